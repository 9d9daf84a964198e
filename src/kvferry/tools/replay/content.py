"""The keys of a request's chunks, made from the identities in a trace.

An engine computes keys from tokens. A trace has no tokens, only identities of prefixes, so the keys here are
made from those. As in an engine, equal keys mean equal content of one KV cache group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np

from kvferry.tools.replay.trace.base import Ids, TraceRequest, batches, chunk_ids, tail_ids

KEY_BYTES = 8
_KEYS = np.dtype(f"V{KEY_BYTES}")
# The golden ratio in 64 bits: multiples of it are far apart, so keys of different groups do not collide.
_PER_GROUP = np.uint64(0x9E3779B97F4A7C15)


def group_keys(ids: Ids, groups: int) -> list[list[bytes]]:
    """Return the keys of chunks in each KV cache group, `KEY_BYTES` bytes each.

    >>> [key.hex() for key in group_keys(np.array([1, 256], np.uint64), 2)[1]]
    ['167c4a7fb979379e', '157d4a7fb979379e']

    Args:
        ids: identities of the chunks, uint64 of shape (chunks,).
    """
    if groups == 1:
        return [ids.view(_KEYS).tolist()]
    own = ids[None, :] + np.arange(groups, dtype=np.uint64)[:, None] * _PER_GROUP
    found: list[list[bytes]] = own.view(_KEYS).tolist()
    return found


class RequestKeys:
    """The keys of a request's chunks in each KV cache group, for one length of chunks.

    `keys_of` and `keys_of_each` compute them.

    Attributes:
        known_tokens: number of tokens, from the start of the request, whose identity the trace has. Tokens
            after the prompt are generated tokens.
        computed_tokens: number of these tokens whose KV the engine computes.
        whole: keys of the whole chunks, one list per group.
    """

    def __init__(
        self,
        request: TraceRequest,
        chunk_tokens: int,
        whole: list[list[bytes]],
        tails: dict[int, tuple[bytes, ...]],
    ) -> None:
        self.chunk_tokens = chunk_tokens
        self.known_tokens = _known_tokens(request)
        # The engine does not compute the KV of the last generated token.
        computed = request.prompt_tokens + max(request.output_tokens - 1, 0)
        self.computed_tokens = min(self.known_tokens, computed)
        self.whole = whole
        self._request, self._tails = request, tails

    def rows(self, tokens: int) -> list[list[bytes]]:
        """Return the keys of the chunks of the request's first tokens, one list per group."""
        whole, rest = divmod(tokens, self.chunk_tokens)
        rows = [keys[:whole] for keys in self.whole]
        if rest:
            for row, key in zip(rows, self.tail(tokens), strict=True):
                row.append(key)
        return rows

    def first(self, group: int, tokens: int) -> bytes:
        """Return the key of the first chunk of the request's first tokens, in one group."""
        return self.whole[group][0] if tokens >= self.chunk_tokens else self.tail(tokens)[group]

    def row(self, tokens: int) -> list[bytes]:
        """Return the keys of `rows` of a model with one group."""
        whole, rest = divmod(tokens, self.chunk_tokens)
        keys = self.whole[0][:whole]
        if rest:
            keys.append(self.tail(tokens)[0])
        return keys

    def in_order(self, prompt: int) -> list[bytes]:
        """Return the keys of all chunks in all groups, in the order of `PromptChunks.all_keys`.

        If the prompt ends inside a chunk, the keys of this chunk, from `tail`, are included.
        """
        groups = len(self.whole)
        found = list(chain.from_iterable(zip(*self.whole, strict=True))) if groups > 1 else self.whole[0][:]
        if prompt % self.chunk_tokens:
            at = prompt // self.chunk_tokens * groups
            found[at:at] = self.tail(prompt)
        return found

    def tail(self, tokens: int) -> tuple[bytes, ...]:
        """Return the key, in each group, of the incomplete last chunk of the request's first tokens.

        Args:
            tokens: length of the prompt, or a shorter prefix that ends in the prompt's last unit.
        """
        if tokens not in self._tails:
            found = _tails([self._request], self.chunk_tokens, len(self.whole), [tokens])
            self._tails[tokens] = found[0]
        return self._tails[tokens]


def keys_of(request: TraceRequest, chunk_tokens: int, groups: int) -> RequestKeys:
    """Compute the keys of a request. For many requests, `keys_of_each` is faster."""
    return keys_of_each([request], chunk_tokens, groups)[0]


def in_batches(requests: Iterable[TraceRequest]) -> Iterator[list[TraceRequest]]:
    """Group consecutive requests for `keys_of_each`, so that its arrays are neither short nor large."""
    return batches(requests, lambda request: len(request.prefix_ids))


def keys_of_each(
    requests: Sequence[TraceRequest], chunk_tokens: int, groups: int, *ends: Sequence[int]
) -> list[RequestKeys]:
    """Compute the keys of requests of one trace, all in a few arrays.

    Args:
        *ends: each has a number of tokens for every request, for which `RequestKeys.tail` will be called. The
            lengths of the prompts need not be given.
    """
    if not requests:
        return []
    counts = np.array([_known_tokens(request) // chunk_tokens for request in requests])
    flat = group_keys(chunk_ids(requests, chunk_tokens, counts), groups)
    prompts = [request.prompt_tokens for request in requests]
    tails: list[dict[int, tuple[bytes, ...]]] = [{} for _ in requests]
    for each in (prompts, *ends):
        computed = _tails(requests, chunk_tokens, groups, each)
        for known, tokens, tail in zip(tails, each, computed, strict=True):
            known[tokens] = tail
    found, begin = [], 0
    for request, end, known in zip(requests, counts.cumsum().tolist(), tails, strict=True):
        found.append(RequestKeys(request, chunk_tokens, [keys[begin:end] for keys in flat], known))
        begin = end
    return found


def _tails(
    requests: Sequence[TraceRequest], chunk_tokens: int, groups: int, tokens: Sequence[int]
) -> list[tuple[bytes, ...]]:
    """Return the key, in each group, of the incomplete last chunk of each request's first tokens."""
    return list(zip(*group_keys(tail_ids(requests, chunk_tokens, np.array(tokens)), groups), strict=True))


def _known_tokens(request: TraceRequest) -> int:
    return max(request.prompt_tokens, len(request.prefix_ids) * request.unit_tokens)
