"""The keys of a request's chunks, made from the identities in a trace.

An engine computes keys from tokens. A trace has no tokens, only identities of prefixes, so the keys here are
made from those. As in an engine, equal keys mean equal content of one KV cache group.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from kvferry.replay.trace.request import Ids, TraceRequest, chunk_ids, tail_id

KEY_BYTES = 8
_KEYS = np.dtype(f"V{KEY_BYTES}")
_PER_GROUP = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def group_keys(ids: Ids, groups: int) -> list[list[bytes]]:
    """Return the keys of chunks in each KV cache group.

    >>> [key.hex() for key in group_keys(np.array([1, 256], np.uint64), 2)[1]]
    ['167c4a7fb979379e', '157d4a7fb979379e']

    Args:
        ids: identities of the chunks, uint64 of shape (chunks,).
        groups: number of KV cache groups.

    Returns:
        A list per group, with one key of `KEY_BYTES` bytes per chunk.
    """
    if groups == 1:
        return [ids.view(_KEYS).tolist()]
    own = ids[None, :] + np.arange(groups, dtype=np.uint64)[:, None] * _PER_GROUP
    found: list[list[bytes]] = own.view(_KEYS).tolist()
    return found


class RequestKeys:
    """The keys of a request's chunks in each KV cache group, for one length of chunks.

    Attributes:
        chunk_tokens: number of tokens per chunk.
        known_tokens: number of tokens, from the start of the request, whose identity the trace has. Tokens
            after the prompt are generated tokens.
        computed_tokens: number of these tokens whose KV the engine computes. It does not compute the KV of
            the last generated token.
        whole: keys of the whole chunks, one list per group.
    """

    def __init__(self, request: TraceRequest, chunk_tokens: int, groups: int) -> None:
        """Compute the keys of a request.

        Args:
            request: request of a trace.
            chunk_tokens: number of tokens per chunk.
            groups: number of KV cache groups.
        """
        self.chunk_tokens = chunk_tokens
        self.known_tokens = max(request.prompt_tokens, len(request.prefix_ids) * request.unit_tokens)
        generated = max(request.output_tokens - 1, 0)
        self.computed_tokens = min(self.known_tokens, request.prompt_tokens + generated)
        self.whole = group_keys(chunk_ids(request, chunk_tokens, self.known_tokens), groups)
        self._tail = partial(tail_id, request, chunk_tokens)
        self._groups = groups
        self._tails: dict[int, list[bytes]] = {}

    def rows(self, tokens: int) -> list[list[bytes]]:
        """Return the keys of the chunks of the request's first tokens, one list per group.

        Args:
            tokens: number of tokens. If a chunk ends after them, see `tail`.
        """
        whole, rest = divmod(tokens, self.chunk_tokens)
        rows = [keys[:whole] for keys in self.whole]
        if rest:
            for row, key in zip(rows, self.tail(tokens), strict=True):
                row.append(key)
        return rows

    def tail(self, tokens: int) -> list[bytes]:
        """Return the key, in each group, of the incomplete last chunk of the request's first tokens.

        Args:
            tokens: length of the prompt in tokens, or a shorter prefix that ends in the prompt's last unit.
        """
        if tokens not in self._tails:
            own = self._tail(tokens)
            each = ((own + group * int(_PER_GROUP)) & _MASK for group in range(self._groups))
            self._tails[tokens] = [key.to_bytes(KEY_BYTES, "little") for key in each]
        return self._tails[tokens]
