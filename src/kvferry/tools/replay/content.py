"""The keys of a request's chunks, made from the identities in a trace.

An engine computes keys from tokens. A trace has no tokens, only identities of prefixes, so the keys here are
made from those. As in an engine, equal keys mean equal content of one KV cache group.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain

import numpy as np
import numpy.typing as npt

from kvferry.keys import TENANT_BYTES, tenant_of
from kvferry.tools.replay.trace.base import GOLDEN, SECOND, Ids, TraceRequest, batches, mixed, places_within

KEY_BYTES = 8
_KEYS = np.dtype(f"V{KEY_BYTES}")
# Zeros between the identity in a key and the tenant, which then is at its place in keys that serve.
_BEFORE_TENANT = bytes(KEY_BYTES)
_DIGEST = re.compile(f"[0-9a-f]{{{2 * TENANT_BYTES}}}")
# Number of a unit that no request has.
_BEYOND = 1 << 62


def _group_keys(ids: Ids, groups: int) -> list[list[bytes]]:
    """Return the keys of chunks in each KV cache group, `KEY_BYTES` bytes each.

    >>> [key.hex() for key in _group_keys(np.array([1, 256], np.uint64), 2)[1]]
    ['167c4a7fb979379e', '157d4a7fb979379e']
    """
    if groups == 1:
        return [ids.view(_KEYS).tolist()]
    # Multiples of the golden ratio are far apart, so keys of different groups do not collide.
    own = ids[None, :] + np.arange(groups, dtype=np.uint64)[:, None] * GOLDEN
    found: list[list[bytes]] = own.view(_KEYS).tolist()
    return found


@lru_cache(1 << 16)
def tenant_digest(name: str) -> bytes:
    """Return the tenant in the keys of a request's chunks, from its name in the trace.

    Recorded traces have the digest itself, in hex. Any other name stands for a cache salt.
    """
    return bytes.fromhex(name) if _DIGEST.fullmatch(name) else tenant_of(name, None)


def _of_tenant(keys: Iterable[bytes], tenant: str) -> list[bytes]:
    """Return keys of chunks of a tenant. Chunks of two tenants have different keys."""
    ending = _BEFORE_TENANT + tenant_digest(tenant)
    return [key + ending for key in keys]


class RequestKeys:
    """The keys of a request's chunks in each KV cache group, for one length of chunks.

    Attributes:
        known_tokens: number of tokens, from the start of the request, whose identity the trace has. Tokens
            after the prompt are generated tokens.
        computed_tokens: number of these tokens whose KV the engine computes.
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

    def in_order_with(self, group: int, numbers: Iterable[int]) -> list[bytes]:
        """Return those of `in_order` of a prompt of whole chunks without the other chunks of one group.

        Args:
            numbers: indices of the chunks of `group` that are included. They are different.
        """
        others = self.whole[:group] + self.whole[group + 1 :]
        found = others[0][:] if len(others) == 1 else list(chain.from_iterable(zip(*others, strict=True)))
        for number in sorted(numbers, reverse=True):
            found.insert(number * len(others) + group, self.whole[group][number])
        return found

    def of_span(self, first: int, end: int, prompt: int) -> list[bytes]:
        """Return those of `in_order` whose chunks have tokens from `first` up to, and not including, `end`.

        The same as `PromptChunks.keys_of_span`.
        """
        groups, size, keys = len(self.whole), self.chunk_tokens, self.in_order(prompt)
        # The incomplete chunk at the end of the prompt, and the chunk that the answer makes of it, have one
        # number.
        tail = prompt // size if prompt % size else len(keys)
        numbers = first // size, -(-end // size)
        begin, stop = ((number + (number > tail)) * groups for number in numbers)
        return keys[begin:stop]

    def tail(self, tokens: int) -> tuple[bytes, ...]:
        """Return the key, in each group, of the incomplete last chunk of the request's first tokens.

        Args:
            tokens: length of the prompt, or a shorter prefix that ends in the prompt's last unit.
        """
        if tokens not in self._tails:
            (found,) = _tails([self._request], self.chunk_tokens, len(self.whole), [tokens])
            tenant = self._request.tenant
            self._tails[tokens] = tuple(_of_tenant(found, tenant)) if tenant else found
        return self._tails[tokens]


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
    flat = _group_keys(_chunk_ids(requests, chunk_tokens, counts), groups)
    prompts = [request.prompt_tokens for request in requests]
    tails: list[dict[int, tuple[bytes, ...]]] = [{} for _ in requests]
    for each in (prompts, *ends):
        computed = _tails(requests, chunk_tokens, groups, each)
        for known, tokens, tail in zip(tails, each, computed, strict=True):
            known[tokens] = tail
    found, begin = [], 0
    for request, end, known in zip(requests, counts.cumsum().tolist(), tails, strict=True):
        whole = [keys[begin:end] for keys in flat]
        if request.tenant:
            whole = [_of_tenant(keys, request.tenant) for keys in whole]
            for tokens, tail in known.items():
                known[tokens] = tuple(_of_tenant(tail, request.tenant))
        found.append(RequestKeys(request, chunk_tokens, whole, known))
        begin = end
    return found


def _tails(
    requests: Sequence[TraceRequest], chunk_tokens: int, groups: int, tokens: Sequence[int]
) -> list[tuple[bytes, ...]]:
    """Return `RequestKeys.tail` of each request. It means nothing for a multiple of `chunk_tokens`."""
    unit, ends = requests[0].unit_tokens, np.array(tokens)
    units = (ends - 1) // unit
    units[units >= np.array([request.prompt_tokens // unit for request in requests])] = _BEYOND
    known = _prefix_ids(requests, np.arange(len(requests)), units)
    found: Ids = mixed(mixed(known ^ (ends % chunk_tokens).astype(np.uint64)) + ends.astype(np.uint64))
    return list(zip(*_group_keys(found, groups), strict=True))


def _chunk_ids(requests: Sequence[TraceRequest], chunk_tokens: int, counts: npt.NDArray[np.int64]) -> Ids:
    """Return the identities of the first whole chunks of each request, uint64, in one array.

    A chunk that ends inside the prompt's incomplete last unit depends on the whole prompt.
    """
    # A chunk's identity covers the unit in which it ends. So equal chunks have different identities if their
    # prompts differ later in that unit, and the replay counts too few hits, unless units divide chunks.
    unit = requests[0].unit_tokens
    ends = (places_within(counts) + 1) * chunk_tokens
    units = (ends - 1) // unit
    found = _prefix_ids(requests, np.arange(len(requests)).repeat(counts), units)
    found += ((units + 1) * unit - ends).astype(np.uint64) * SECOND
    return found


def _prefix_ids(
    requests: Sequence[TraceRequest], owners: npt.NDArray[np.int64], units: npt.NDArray[np.int64]
) -> Ids:
    """Return the identity of each prefix that ends at a unit; of the whole prompt if the unit is unknown."""
    each = [request.prefix_ids for request in requests]
    prompts = np.array([request.prompt_id for request in requests], np.uint64)
    known = np.array([len(ids) for ids in each])
    places = np.where(units < known[owners], (known.cumsum() - known)[owners] + units, known.sum() + owners)
    found: Ids = np.concatenate([*each, prompts])[places]
    return found


def _known_tokens(request: TraceRequest) -> int:
    return max(request.prompt_tokens, len(request.prefix_ids) * request.unit_tokens)
