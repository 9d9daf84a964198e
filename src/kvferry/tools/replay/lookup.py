"""Simulated tiers, and the look-up of a prompt in them: how much they hold, and which chunks a load needs."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.planning import (
    ChunkedPrompt,
    LoadSpan,
    longest_prefixes,
    needed_chunk_range,
    windows_survive_load,
)
from kvferry.tiers import EvictionPolicy, Slot, TenantUsage, WriteBudget
from kvferry.tools.replay.content import RequestKeys
from kvferry.tools.replay.settings import ServedModel


@dataclass(slots=True)
class TierCounts:
    """The chunks that a simulated tier has stored, given to loads and evicted so far."""

    # `stored`, `read`, `evicted`, `dropped`, `declined`: numbers of chunks. A chunk is dropped if there is no
    # room for it.
    stored: int = 0
    stored_bytes: int = 0
    read: int = 0
    read_bytes: int = 0
    evicted: int = 0
    evicted_bytes: int = 0
    dropped: int = 0
    declined: int = 0  # chunks that were not written to spare the disk
    most_bytes: int = 0

    @classmethod
    def sum(cls, each: Sequence[TierCounts]) -> TierCounts:
        return cls(*(sum(getattr(one, name) for one in each) for name in cls.__slots__))


class ReadableTier:
    """A tier from which an engine loads.

    Attributes:
        chunk_bytes: bytes of a chunk of each KV cache group, as the tier keeps it.
        held: the chunks that can be loaded, by key. Callers must not change it.
        is_searched: True if an engine asks for a prompt's chunks that no faster tier has.
    """

    is_searched: ClassVar[bool] = False

    def __init__(self, chunk_bytes: Sequence[int], held: Mapping[bytes, object]) -> None:
        self.chunk_bytes, self.held = tuple(chunk_bytes), held
        self.counts = [TierCounts() for _ in chunk_bytes]

    @property
    def tenants(self) -> Mapping[str, TenantUsage]:
        """Usage by the labels of tenants; empty if they do not share the tier by weight."""
        return {}

    def lacks(self, keys: Iterable[bytes]) -> list[bytes]:
        held = self.held
        return [key for key in keys if key not in held]

    def count_reads(self, keys: Sequence[bytes], group: int) -> int:
        """Count reads of chunks of one group. Return their bytes."""
        size = len(keys) * self.chunk_bytes[group]
        self.counts[group].read += len(keys)
        self.counts[group].read_bytes += size
        return size


class SimulatedTier(ReadableTier):
    """The chunks of a tier that stores. The eviction policy is the one that serves.

    The capacity is counted in bytes of chunks. A real host tier divides its memory into slabs of one chunk
    size each, so with chunks of several sizes it holds slightly less.

    Methods take the keys of chunks that are evicted before all others as `cold`.

    Attributes:
        policy: ranks the chunks in `held`. Callers may rank chunks, but not pin, add or evict any.
        budget: limit on what `write` writes; None for no limit.
        now: seconds since the start of the trace, which only the budget needs.
    """

    def __init__(
        self,
        capacity_bytes: int,
        chunk_bytes: Sequence[int],
        policy: Callable[[int], EvictionPolicy],
        write_per_day: int | None = None,
    ) -> None:
        self.budget = None if write_per_day is None else WriteBudget(write_per_day)
        self.now = 0.0
        self._groups: dict[bytes, int] = {}  # KV cache group of each chunk
        super().__init__(chunk_bytes, self._groups)
        self.capacity_bytes, self.used_bytes = capacity_bytes, 0
        self.policy = policy(capacity_bytes)
        # The policy may tell tenants apart, and then evicts by the tenant of the chunk that is stored.
        self._is_shared = bool(self.policy.tenants)
        self._holds = Counter[bytes]()  # number of holds of each chunk that cannot be evicted
        self._held_bytes = 0

    @property
    def tenants(self) -> Mapping[str, TenantUsage]:
        return self.policy.tenants

    def hold(self, key: bytes) -> Slot | None:
        """Keep a chunk from being evicted until `close`; None if the tier does not have it."""
        if (group := self._groups.get(key)) is None:
            return None
        size = self.chunk_bytes[group]
        if not self._holds[key]:
            self.policy.pin(key)
            self._held_bytes += size
        self._holds[key] += 1
        return Slot(key, group, 0, size, 0)

    def close(self, slot: Slot) -> None:
        self._holds[slot.key] -= 1
        if not self._holds[slot.key]:
            del self._holds[slot.key]
            self._held_bytes -= slot.size
            self.policy.unpin(slot.key)

    def contains(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        return np.array([key in self.held for key in keys], np.bool_)

    def make_cold(self, keys: Sequence[bytes]) -> None:
        self.policy.make_cold(keys)

    def pin_all(self, keys: Iterable[bytes]) -> None:
        """Keep chunks from being evicted until `unpin_all`."""
        holds = self._holds
        self.policy.pin_all([key for key in keys if key not in holds] if holds else keys)

    def unpin_all(self, keys: Iterable[bytes]) -> None:
        holds = self._holds
        self.policy.unpin_all([key for key in keys if key not in holds] if holds else keys)

    def reserve(self, keys: Sequence[bytes], sizes: Sequence[int], reserved: int = 0) -> int:
        """Make room for new chunks, beside `reserved` bytes. Return for how many of the first ones there is.

        The caller admits these.
        """
        ends = list(accumulate(sizes))
        if not self._is_shared:
            return bisect_right(ends, self.make_room(reserved + ends[-1]) - reserved) if ends else 0
        for number, (key, end) in enumerate(zip(keys, ends, strict=True)):
            self.policy.expect(key, sizes[number])
            while self.policy.is_over_limit or self.used_bytes + reserved + end > self.capacity_bytes:
                if (victim := self.policy.evict()) is None:
                    self.policy.unexpect(key)
                    return number
                self._forget([victim])
        return len(ends)

    def make_room(self, size: int) -> int:
        """Evict chunks until `size` bytes are free, or none is left to evict. Return the free bytes."""
        if (missing := self.used_bytes + size - self.capacity_bytes) > 0:
            self._forget(self.policy.evict_bytes(missing))
        return self.capacity_bytes - self.used_bytes

    def _forget(self, keys: Sequence[bytes]) -> None:
        """Count evicted chunks, and free their bytes."""
        evicted = list(map(self._groups.pop, keys))
        for group in set(evicted):
            number, counts = evicted.count(group), self.counts[group]
            size_of_all = number * self.chunk_bytes[group]
            counts.evicted += number
            counts.evicted_bytes += size_of_all
            self.used_bytes -= size_of_all

    def fits_beside(self, size: int, keys: Iterable[Sequence[bytes]]) -> bool:
        """Return True if the tier has room for `size` bytes without the eviction of any of `keys`."""
        if self._is_shared:
            return False
        missing = self.used_bytes + size - self.capacity_bytes
        if missing <= 0:
            return True
        if size > self.capacity_bytes - self._held_bytes or (oldest := self.policy.oldest(missing)) is None:
            return False
        evicted = frozenset(oldest)
        return all(map(evicted.isdisjoint, keys))

    def store(
        self, runs: Iterable[tuple[int, Sequence[bytes]]], cold: Collection[bytes] = ()
    ) -> list[tuple[int, Sequence[bytes]]]:
        """Store new chunks, as host memory stores the chunks that one step of an engine computes.

        Those that do not fit are dropped.

        Args:
            runs: (index of the group, keys in the order of the prompt) of each run. Keys are different, and
                the tier does not hold them. An iterator sees the evictions so far.

        Returns:
            The runs without dropped chunks, each in the order in which its chunks were admitted.
        """
        stored: list[tuple[int, Sequence[bytes]]] = []
        # Room is made for all chunks before the first one is stored, so they do not evict each other.
        reserved = 0
        for group, keys in runs:
            size = self.chunk_bytes[group]
            fitting = self.reserve(keys, [size] * len(keys), reserved)
            self.counts[group].dropped += len(keys) - fitting
            reserved += size * fitting
            # Admitted from the last to the first, so that the last one is evicted first.
            stored.append((group, keys[:fitting][::-1]))
        for group, keys in stored:
            self.admit(keys, group, cold)
        return stored

    def write(self, keys: Iterable[bytes], group: int, cold: Collection[bytes] = ()) -> list[bytes]:
        """Write those chunks of one group that are not held, one after the other. Return their keys."""
        size = self.chunk_bytes[group]
        new = self._affordable(self.lacks(keys), group)
        if self._is_shared or any(key in cold for key in new):  # the next chunk may evict one of these
            for key in new:
                if self.reserve([key], [size]):
                    self.admit([key], group, cold)
        elif new and (fitting := self.make_room(size * len(new)) // size):
            self.admit(new[-fitting:], group)
        return new

    @property
    def budget_left(self) -> float | None:
        return None if self.budget is None else self.budget.left(self.now)

    def _affordable(self, keys: list[bytes], group: int) -> list[bytes]:
        """Return the first chunks, as many as may be written now. Charge them, and decline the others."""
        if self.budget is None:
            return keys
        for number in range(len(keys)):
            if not self.budget.left(self.now):
                self.counts[group].declined += len(keys) - number
                return keys[:number]
            self.budget = self.budget.after_write(self.chunk_bytes[group], self.now)
        return keys

    def admit(self, keys: Sequence[bytes], group: int, cold: Collection[bytes] = ()) -> None:
        """Add chunks of one group that are not held, the last one as the newest. There must be room."""
        if not keys:
            return
        size, counts = self.chunk_bytes[group], self.counts[group]
        total = size * len(keys)
        if cold:
            self.policy.admit_all([key for key in keys if key in cold], size, cold=True)
            self.policy.admit_all([key for key in keys if key not in cold], size)
        else:
            self.policy.admit_all(keys, size)
        self._groups.update(dict.fromkeys(keys, group))
        self.used_bytes += total
        counts.stored += len(keys)
        counts.stored_bytes += total
        counts.most_bytes = max(counts.most_bytes, counts.stored_bytes - counts.evicted_bytes)


class Wanted(NamedTuple):
    """The chunks that a load needs, in the order of the prompt: their keys, groups, and fastest tiers."""

    keys: Sequence[bytes] = ()
    groups: Sequence[int] = ()
    tiers: Sequence[int] = ()


class Found(NamedTuple):
    """What tiers hold of a prompt."""

    # Length in tokens of the longest prefix that can be loaded, at least that of the engine's own prefix.
    tokens: int
    # Length in tokens of the longest prefix for which all full-attention chunks are held.
    attention_tokens: int
    group_tokens: tuple[int, ...]  # length in tokens of the longest prefix that each group alone could use
    tier_tokens: tuple[int, ...]  # number of tokens that each tier provides in a load of the longest prefix
    wanted: Wanted


# Numbers of a chunk that no tier holds, and of one in host memory. In bytes, tiers are numbered from 1.
_NOT_HELD, _IN_HOST = 0, 1
_IS_HELD = bytes([0]) + bytes([1]) * 255
# Place of the bit beside a number that says whether a slower tier holds the chunk.
_HELD_BIT = 7


def look_up(
    model: ServedModel, tiers: Sequence[ReadableTier], prompt: int, keys: RequestKeys, local: int
) -> Found | None:
    """Look a prompt up in an engine's tiers, the fastest first; None if they do not hold its first chunk."""
    size = keys.chunk_tokens
    # As in `connector.tiers.source`: which prompts may be loaded to their end, and which have a tail.
    in_full = model.has_only_attention or windows_survive_load(model.block_groups, prompt)
    tokens = prompt if in_full else prompt - 1
    if not (in_full and model.state is None):
        tokens -= tokens % size
    if not tokens:
        return None
    # Most prompts of a trace are new, and their first chunk tells it without a look-up of the others.
    if model.attention and local < size:
        first = keys.first(model.attention[0], tokens)
        if first not in tiers[0].held and not any(first in tier.held for tier in tiers[1:]):
            return None
    rows, chunked = keys.rows(tokens), ChunkedPrompt(tokens, size, prompt, local)
    numbers = [_tier_numbers(tiers, row) for row in rows]
    held = numbers if len(tiers) == 1 else [row.translate(_IS_HELD) for row in numbers]
    found = longest_prefixes(model.groups, chunked, held)
    if found.tokens <= local:
        return Found(*found, (0,) * len(tiers), Wanted())
    span = LoadSpan(local, found.tokens, prompt)
    needed = [needed_chunk_range(group, span, size) for group in model.groups]
    tier_tokens = _tokens_by_tier(numbers[model.widest], chunked, found.tokens, len(tiers))
    return Found(*found, tier_tokens, _wanted(rows, numbers, needed))


def _wanted(rows: Sequence[Sequence[bytes]], numbers: Sequence[bytes], needed: Sequence[range]) -> Wanted:
    if len(rows) == 1:
        first, after = needed[0].start, needed[0].stop
        keys = rows[0][first:after]
        return Wanted(keys, [0] * len(keys), [number - _IN_HOST for number in numbers[0][first:after]])
    places = sorted((chunk, group) for group, chunks in enumerate(needed) for chunk in chunks)
    return Wanted(
        [rows[group][chunk] for chunk, group in places],
        [group for _, group in places],
        [numbers[group][chunk] - _IN_HOST for chunk, group in places],
    )


def _tokens_by_tier(numbers: bytes, chunked: ChunkedPrompt, end: int, tiers: int) -> tuple[int, ...]:
    """Return the tokens that each tier provides, as `Coverage.tokens_by_tier`, for all tiers."""
    size, local = chunked.chunk_tokens, chunked.local_tokens
    if tiers == 1:
        return (end - local,)
    first, after = local // size, -(-end // size)
    # A load does not need a chunk that no tier holds, for example before a window. It counts as host memory.
    each = [max(number, _IN_HOST) - _IN_HOST for number in numbers[first:after]]
    found = [each.count(tier) * size for tier in range(tiers)]
    found[each[0]] -= local - first * size
    found[each[-1]] -= after * size - end
    return tuple(found)


def _tier_numbers(tiers: Sequence[ReadableTier], row: Sequence[bytes]) -> bytes:
    """Return the number of the fastest tier that holds each chunk."""
    numbers = bytes(map(tiers[0].held.__contains__, row))
    for number, tier in enumerate(tiers[1:], _IN_HOST + 1):
        if _NOT_HELD not in numbers:
            break
        # As integers, because a loop over the chunks takes twice as long.
        held = int.from_bytes(map(tier.held.__contains__, row), "little") << _HELD_BIT
        both = int.from_bytes(numbers, "little") | held
        numbers = both.to_bytes(len(row), "little").translate(_faster_number(number))
    return numbers


@cache
def _faster_number(number: int) -> bytes:
    """Return a table from the number of a faster tier, and the bit of tier `number`, to the faster number."""
    faster = range(_IN_HOST, 1 << _HELD_BIT)
    return bytes([_NOT_HELD, *faster, number, *faster])
