"""A digest of the prompt that KV was computed from.

A router can pair the wrong halves of two requests, and two engines can apply different chat templates to the
same text. The producer states which tokens its blocks hold. A consumer with other tokens computes the KV
itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def prompt_digest(tokens: Sequence[int], extras: Sequence[str] = ()) -> str:
    """Return the hex digest (128 bits, BLAKE2b) of token ids and everything else that decides the content.

    Args:
        tokens: token ids of the prompt, in order.
        extras: other inputs, in a fixed order: LoRA adapter, multimodal hashes, cache salt.

    >>> prompt_digest([1, 2, 3]) == prompt_digest((1, 2, 3))
    True
    >>> prompt_digest([1, 2, 3]) == prompt_digest([1, 2])
    False
    """
    digest = hashlib.blake2b(digest_size=16, person=b"kvferry-prompt")
    # Lengths come first, so that no tokens read like an extra, nor two extras like one.
    digest.update(len(tokens).to_bytes(8, "little") + np.asarray(tokens, dtype="<i8").tobytes())
    for extra in extras:
        data = extra.encode("utf-8", "surrogatepass")  # JSON can carry half a pair into a cache salt
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
