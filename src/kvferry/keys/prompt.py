"""A digest of the prompt that KV was computed from.

A router can pair the prefill of one request with the decode of another. Two engines can apply different chat
templates to the same text. So the producer sends the digest of the prompt whose KV is in its blocks. A
consumer whose prompt has another digest computes the KV itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def prompt_digest(tokens: Sequence[int], extras: Sequence[str] = ()) -> str:
    """Return the digest of token ids and of other inputs that determine the KV: BLAKE2b, 32 hex digits.

    Args:
        extras: the other inputs in order, such as LoRA adapter, multimodal hashes or cache salt.

    >>> prompt_digest([1, 2, 3]) == prompt_digest((1, 2, 3))
    True
    >>> prompt_digest([1, 2, 3]) == prompt_digest([1, 2])
    False
    """
    digest = hashlib.blake2b(digest_size=16, person=b"kvferry-prompt")
    # Each part follows its length. So tokens cannot be read as an extra, nor two extras as one.
    digest.update(len(tokens).to_bytes(8, "little") + np.asarray(tokens, dtype="<i8").tobytes())
    for extra in extras:
        data = extra.encode("utf-8", "surrogatepass")  # a cache salt from JSON may have a lone surrogate
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
