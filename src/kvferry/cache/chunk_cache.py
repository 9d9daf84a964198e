"""The tiered cache of one engine: chunks of KV by key, in host memory and in slower tiers.

Every chunk passes through host memory. The engine's ranks copy chunks between host memory and their KV
blocks. Background threads copy them between host memory and storage (`tier_queue`).

    store   reserve ─▶ (ranks copy) ─▶ filled ─▶ in host memory, and queued for every slow tier
                                                  ─▶ held, and written ─▶ in the slow tier

    load    fetch ─▶ hold each chunk in host memory, or read it from the fastest tier that has it; on a miss,
                     the next ─▶ in host memory, queued for faster tiers (promotion) ─▶ ready
                     ─▶ (ranks copy) ─▶ `HostTier.close`

A *held* chunk is not evicted. A chunk that several loads want is read once. Only `shutdown` blocks, and for a
few milliseconds `await_reads`. A tier that fails raises no exception: its chunks count as missed, or are not
stored.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, field, replace
from threading import Event

import numpy as np
import numpy.typing as npt

from kvferry.cache.tier_queue import Ended, TierQueue
from kvferry.geometry.canonical import CanonicalGroup
from kvferry.planning.coverage import NO_TIER, TierNumbers
from kvferry.tiers.format.chunk import ChunkGroup
from kvferry.tiers.format.decode import chunk_group
from kvferry.tiers.host.settings import HostMissReason
from kvferry.tiers.host.tier import HostTier, Slot
from kvferry.tiers.index import MAX_TIERS, Tags, tags_of
from kvferry.tiers.names import HOST, GetOutcome, PutOutcome
from kvferry.tiers.storage_tier import KeySearch, LateFetch

# Share of host memory in use above which write-back starts to write.
WRITE_BACK_SHARE = 0.5

# A request that arrives while an idle engine waits is delayed by the wait.
FIRST_READ_SECONDS = 0.003
"""Maximum seconds that a step of an idle engine waits for a read of storage to end."""

# The ranks copy chunks that arrive shortly after each other in the same step.
MOST_READS_SECONDS, NEXT_READ_SECONDS = 0.010, 0.001
"""After a read, maximum seconds of the whole wait, and until the next read ends."""


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """A chunk of a prompt in one KV cache group."""

    group: int  # index of the KV cache group in the storage format
    number: int  # index of the chunk in the prompt
    key: bytes  # key of the chunk in this group
    tokens: int  # number of tokens in the chunk; 0 for a snapshot
    cold: bool = False  # True if host memory evicts it before all others once it is stored, until it is used


@dataclass(slots=True)
class Fetch:
    """The chunks of one load on their way from the tiers to host memory.

    `ChunkCache` moves each chunk from `remaining` to `reading` if a slow tier must be read, and then to
    `ready`. The load takes ready chunks with `take`.
    """

    remaining: deque[PromptChunk] = field(default_factory=deque)  # chunks neither held nor being read
    without: frozenset[str] = frozenset()  # names of tiers that the load must not read from
    reading: dict[bytes, PromptChunk] = field(default_factory=dict)  # chunks that are being read, by key
    # Chunks in host memory, held until the load closes the slot.
    ready: list[tuple[PromptChunk, Slot]] = field(default_factory=list)
    # Names of the tiers, host memory included, that have provided chunks of this load so far.
    tiers: set[str] = field(default_factory=set)
    # Names of the tiers in which a read for this load had an I/O error. A tier that merely no longer has a
    # chunk is not included.
    failed: set[str] = field(default_factory=set)
    # Reason why the fetch cannot continue; None if it can. Chunks in `ready` stay ready.
    failure: str | None = None
    # Outcome for the chunk that caused the failure, such as ABSENT if no tier has it any more; None if there
    # is no failure, or if the cache was reset.
    miss: GetOutcome | None = None

    @property
    def over(self) -> bool:
        return self.failure is not None or not (self.remaining or self.reading)

    def take(self) -> list[tuple[PromptChunk, Slot]]:
        """Remove and return all ready chunks. The caller must close the slots."""
        found, self.ready = self.ready, []
        return found


@dataclass(slots=True)
class _CacheCounts:
    # Chunks that ranks have copied, or failed to copy, to host memory.
    stored: int = 0
    failed: int = 0
    # Chunks made ready for a load, by name of the tier that they came from.
    fetched: Counter[str] = field(default_factory=Counter)
    # Reads that did not return the chunk although the tier listed it, by name of the tier and outcome.
    missed: Counter[tuple[str, GetOutcome]] = field(default_factory=Counter)


@dataclass(slots=True)
class _Incoming:
    """A chunk that is being read into host memory."""

    slot: Slot
    group: ChunkGroup
    source: int  # index of the slow tier that the chunk is read from
    others: list[int]  # indices of the slow tiers to try if this read fails, the fastest first
    waiting: list[Fetch]


class ChunkCache:
    """The chunks of one engine in host memory and storage. Only the engine's scheduling thread may use it.

    Args:
        host: empty host tier. From now on, callers may only look chunks up in it, hold them and make them
            cold, and close slots.
        memory_at: map an offset and a size, in bytes, to writable memory of the arena.
        groups: KV cache groups with the formats of their chunks. A chunk's group is an index into this
            sequence.
        slow_tiers: slow tiers, the fastest first. From now on, only the cache may use them.
        arrived: set after each read of a slow tier; tests pass one.

    Attributes:
        tiers: names of host memory and of the slow tiers, in the order of the configuration.
        bits: their bits in the key table, in the same order.
        incoming: chunks that are being read, by key.
        events: counter that increases whenever `counts`, or the seconds of transfers here and in the slow
            tiers, may have changed, or what others count of chunks that were not stored.
        copy_seconds: seconds that each copy of chunks from host memory to KV blocks took, by the slowest
            rank, since the last event about tiers, which clears the list.

    Raises:
        ValueError: the tiers do not share one key table.
    """

    def __init__(
        self,
        host: HostTier,
        memory_at: Callable[[int, int], memoryview],
        groups: Sequence[CanonicalGroup],
        slow_tiers: Sequence[TierQueue] = (),
        clock: Callable[[], float] = time.monotonic,
        *,
        arrived: Event | None = None,
    ) -> None:
        if any(one.tier.keys.table is not host.keys.table for one in slow_tiers):
            raise ValueError("the tiers of one cache must share one key table; open them together")
        self.host, self.slow_tiers = host, tuple(slow_tiers)
        self.counts, self.events, self.copy_seconds = _CacheCounts(), 0, list[float]()
        self._memory_at, self._clock = memory_at, clock
        self._arrived = Event() if arrived is None else arrived
        for slow in self.slow_tiers:
            slow.reads.on_ended = self._arrived.set
        self.tiers = (HOST, *(slow.name for slow in self.slow_tiers))
        self.bits = (host.keys.bit, *(slow.tier.keys.bit for slow in self.slow_tiers))
        # The description of a snapshot of each group, and those of chunks of other lengths, of which there
        # are few.
        self._formats = [chunk_group(group, 0) for group in groups]
        self._descriptions: dict[tuple[int, int], ChunkGroup] = {}
        # Indices of the slow tiers, the fastest first. The first one is tier number 1.
        self._order = tuple(range(len(self.slow_tiers)))
        self._fastest_tier_tables: dict[tuple[tuple[int, ...], tuple[bool, ...]], TierNumbers] = {}
        self.incoming: dict[bytes, _Incoming] = {}
        self.fetches: list[Fetch] = []
        # Slots to which late reads may still write. They are freed in some later step.
        self._late: dict[LateFetch, Slot] = {}
        # Slow tiers to which writes may start since the last `poll`, by name: chunks were queued, writes have
        # ended, or host memory has filled up.
        self._to_write: dict[str, TierQueue] = {}
        self._write_back = [slow for slow in slow_tiers if slow.write_back]

    @property
    def busy(self) -> bool:
        """True if a load waits for chunks, or a write to a tier that does not hang is in flight or due.

        In write-back mode, no write is due while host memory has room.
        """
        for slow in self.slow_tiers:
            if (slow.held or (slow.queued and self._may_write(slow))) and not slow.writes.stuck:
                return True
        return bool(self.fetches)

    @property
    def agenda(self) -> tuple[Sized, ...]:
        """Containers that are all empty if `poll` has nothing to do."""
        ended = [one.ended for slow in self.slow_tiers for one in (slow.reads, slow.writes)]
        return self.fetches, self._to_write, *ended

    def rank(self, seconds: Callable[[str], float]) -> None:
        """Number the slow tiers by the expected seconds of a load, given their names.

        Tiers with equal times keep their order.
        """
        if len(self.slow_tiers) > 1:
            slow = self.slow_tiers
            self._order = tuple(sorted(range(len(slow)), key=lambda at: seconds(slow[at].name)))

    @property
    def ranked(self) -> tuple[str, ...]:
        """Names of the tiers by tier number, the fastest first."""
        return (HOST, *(self.slow_tiers[at].name for at in self._order))

    def tier_numbers(self, tags: Tags, without: Iterable[str] = ()) -> TierNumbers:
        """Return the number of the tier from which each chunk would be read now: int64 of shape (len(tags),).

        It is an index of `ranked`, and `NO_TIER` for no tier. If the chunk is already being read for another
        load, it is that of the slow tier from which it is being read, or `NO_TIER` if that tier hangs or is
        named in `without`.
        """
        names = frozenset(without)
        # No read should start if earlier ones hang, or the tier pauses after failures.
        refusing = [one.name in names or one.reads.stuck or one.tier.paused for one in self.slow_tiers]
        allowed = (True, *[not refuses for refuses in refusing])
        found = self._fastest_tier_table(allowed).take(self.host.keys.table.tier_bits(tags))
        if self.incoming:
            coming = np.maximum(found, self._incoming_tiers(tags, names))
            found = np.where((found > 0) & (found < NO_TIER), coming, found)
        return found

    def available(self, keys: Sequence[bytes], without: Iterable[str] = ()) -> npt.NDArray[np.bool_]:
        """Return a mask of the chunks that can be loaded now, not from the tiers named in `without`."""
        return self.tier_numbers(tags_of(keys), without) < NO_TIER

    def find(self, keys: Sequence[bytes], hints: Sequence[tuple[str, int]]) -> list[KeySearch]:
        """Begin to search for chunks in tiers (`StorageTier.find`), each for those that no faster one has."""
        found = []
        numbers = self.tier_numbers(tags_of(keys)) if keys else ()
        for number, at in enumerate(self._order, 1):
            slow = self.slow_tiers[at]
            if not slow.tier.find_seconds:
                continue
            lacking = [key for key, fastest in zip(keys, numbers, strict=True) if fastest > number]
            if (search := slow.tier.find(lacking, hints)) is not None:
                found.append(search)
        return found

    @property
    def searched(self) -> tuple[Sequence[str], float] | None:
        """Tiers that are faster than all that search, and the longest time of a search; None if none does."""
        times = [self.slow_tiers[at].tier.find_seconds for at in self._order]
        first = next((number for number, seconds in enumerate(times, 1) if seconds), None)
        return None if first is None else (self.ranked[:first], max(times))

    @property
    def declined(self) -> Counter[tuple[str, str]]:
        """Number of chunks that admission filters declined, by tier and reason."""
        each = (
            (slow.name, reason, n) for slow in self.slow_tiers for reason, n in slow.filter.declined.items()
        )
        return Counter({(name, str(reason)): n for name, reason, n in each})

    def miss_reason(self, key: bytes) -> HostMissReason:
        why = self.host.miss_reason(key)
        if why is HostMissReason.ABSENT:
            for slow in self.slow_tiers:
                if key in slow.tier.keys.recently_evicted:
                    return HostMissReason.EVICTED
        return why

    @property
    def same_name_namespace(self) -> str:
        """Digest (hex) of another namespace with the same model name; empty if there is none.

        A slow tier has that namespace, and none of this engine's chunks: an engine with other settings has
        probably stored there.
        """
        return next((one for slow in self.slow_tiers if (one := slow.usage.same_name_namespace)), "")

    def reserve(self, key: bytes, group: int, *, counted: bool = True) -> Slot | None:
        """Reserve a slot in host memory for a chunk that will be filled; None if it is dropped.

        A chunk is dropped that the host tier has, that is being filled, or that has no room. The host tier
        counts it, if `counted`.
        """
        self.events += 1
        slot = self.host.reserve(key, group, counted=counted)
        for slow in self._write_back:
            self._to_write[slow.name] = slow
        return slot

    def filled(
        self,
        slot: Slot,
        tokens: int,
        failure: str | None,
        *,
        cold: bool = False,
        prompt_tokens: int | None = None,
    ) -> None:
        """Make a chunk available for loads, and queue it for the slow tiers, once no rank uses its slot.

        `tokens` are those in the chunk, 0 for a snapshot. `prompt_tokens` is the length of its prompt. After
        a `failure` of the ranks, the slot is freed.
        """
        self.events += 1
        if failure is not None:
            self.counts.failed += 1
            self.host.abort(slot)
        elif self.host.commit(slot, cold=cold):
            self.counts.stored += 1
            for slow in self.slow_tiers:
                group = self._describe_chunk(slot.group, tokens)
                slow.enqueue(slot.key, group, cold=cold, prompt_tokens=prompt_tokens)
                self._to_write[slow.name] = slow

    def mark_used(
        self,
        keys: Sequence[bytes],
        cold: Sequence[bytes] = (),
        tokens: int = 0,
        prompt_tokens: int = 0,
    ) -> None:
        """Rank chunks, in the order of their prompt, as used last, and `cold` ones to be evicted first.

        `tokens` is the length of the prefix that ends with the last of `keys`.
        """
        self.host.mark_used(keys, cold, tokens)
        for slow in self.slow_tiers:
            slow.mark_used(keys)
            if slow.enqueue_used(keys, prompt_tokens, self._is_in_host_memory):
                self._to_write[slow.name] = slow

    def fetch(self, wanted_chunks: Iterable[PromptChunk], without: Iterable[str] = ()) -> Fetch:
        """Start to read chunks into host memory for a load, in their order. `poll` continues it.

        A chunk in host memory is held until the load closes its slot.
        """
        self.events += 1
        fetch = Fetch(without=frozenset(without))
        # Hold all that host memory has before any read starts, which may evict to make room.
        for want in wanted_chunks:
            slot = self.host.open(want.key)
            if slot is None:
                fetch.remaining.append(want)
            else:
                self._add_ready(fetch, want, slot, HOST)
        self.fetches.append(fetch)
        self._advance(fetch)
        return fetch

    def copied(self, slots: Sequence[Slot], seconds: float) -> None:
        """Release the slots of a load's chunks, which ranks have copied to KV blocks in so many seconds."""
        self.events += 1
        self.copy_seconds.append(seconds)
        # The last slot released is used last, so the start of a prompt is evicted after its end.
        for slot in reversed(slots):
            self.host.close(slot)

    def cancel(self, fetch: Fetch) -> None:
        """Cancel a fetch and release its slots. The chunks of reads in flight still get into host memory."""
        for _, slot in fetch.take():
            self.host.close(slot)
        fetch.remaining.clear()
        fetch.reading.clear()

    def awaited_tiers(self, fetch: Fetch) -> set[str]:
        """Return the names of the slow tiers from which chunks of a fetch are still being read."""
        return {self.slow_tiers[self.incoming[key].source].name for key in fetch.reading}

    def origin(self, fetch: Fetch) -> str:
        """Return the name of the slowest tier from which chunks of a fetch have been or are being read."""
        names = self.awaited_tiers(fetch) | fetch.tiers
        return next((name for name in reversed(self.ranked) if name in names), HOST)

    def await_reads(self) -> None:
        """Wait a moment for reads to end, unless a load can go on. For a step that computes nothing."""
        if not self.fetches or any(fetch.ready or fetch.over for fetch in self.fetches):
            return
        began = self._clock()
        until, in_flight = began + FIRST_READ_SECONDS, self._reads_in_flight()
        while in_flight and (left := until - self._clock()) > 0:
            self._arrived.wait(left)
            # Before the count: a read that ends later sets it again.
            self._arrived.clear()
            if (found := self._reads_in_flight()) < in_flight:
                until = min(began + MOST_READS_SECONDS, self._clock() + NEXT_READ_SECONDS)
            in_flight = found

    def poll(self) -> None:
        """Collect the results of reads and writes, and start more. Call this once per step."""
        for slow in self.slow_tiers:
            for done in slow.done():
                self.events += 1
                if isinstance(done.what, GetOutcome):
                    if done.what is GetOutcome.HIT:
                        slow.read_seconds.append(done.seconds)
                    self._on_read_ended(done.key, done.what, done.late)
                else:
                    self._on_write_ended(slow, done)
        self._free_late_slots()
        # After all results: freed slots make room for more chunks of waiting loads.
        if self.fetches:
            self.events += 1
            for fetch in self.fetches:
                self._advance(fetch)
            self.fetches[:] = [fetch for fetch in self.fetches if not fetch.over]
        for slow in self._to_write.values():
            while slow.queued and self._may_write(slow) and slow.can_write:
                self._write_next(slow)
        self._to_write.clear()

    def clear(self) -> None:
        """Drop all chunks in host memory and all queued writes. Slow tiers keep their chunks."""
        self.events += 1
        self.host.clear()
        for slow in self.slow_tiers:
            slow.queued.clear()
            slow.filter.forget()

    def shutdown(self, patience_seconds: float) -> None:
        """Write all queued chunks to the slow tiers, and end their threads.

        What has not ended after about `patience_seconds` is abandoned, and a warning is logged.
        """
        for slow in self.slow_tiers:
            # Whatever the write mode, and beyond the tier's limit on writes.
            while slow.queued:
                self._write_next(slow)
        ends = self._clock() + patience_seconds
        for slow in self.slow_tiers:
            slow.close(max(ends - self._clock(), 0))

    def _describe_chunk(self, group: int, tokens: int) -> ChunkGroup:
        if (group, tokens) not in self._descriptions:
            self._descriptions[group, tokens] = replace(self._formats[group], tokens=tokens)
        return self._descriptions[group, tokens]

    def _is_in_host_memory(self, key: bytes) -> bool:
        return bool(self.host.contains([key])[0])

    def _may_write(self, slow: TierQueue) -> bool:
        return not slow.write_back or self.host.used_bytes > WRITE_BACK_SHARE * self.host.capacity_bytes

    def _write_next(self, slow: TierQueue) -> None:
        """Start the write of the oldest queued chunk, or count it as lost if host memory has evicted it."""
        self.events += 1
        key, (group, cold) = slow.queued.popitem(last=False)
        slot = self.host.hold(key)
        if slot is None:
            slow.lost += 1
            return
        slow.held[key] = slot
        slow.writes.start(key, group, self._memory_at(slot.offset, slot.size), cold=cold)

    def _fastest_tier_table(self, allowed: tuple[bool, ...]) -> TierNumbers:
        """Return a table that maps `KeyTable.tier_bits` to the number of the fastest allowed tier among them.

        It is int64 of shape (1 << MAX_TIERS,), with `NO_TIER` for none. `allowed` is in the order of `tiers`.
        """
        case = self._order, allowed
        if case not in self._fastest_tier_tables:
            marks = np.arange(1 << MAX_TIERS)
            found = self._fastest_tier_tables[case] = np.full(len(marks), NO_TIER)
            order = (0, *(at + 1 for at in self._order))
            for number, at in reversed([*enumerate(order)]):
                if allowed[at]:
                    found[(marks & self.bits[at]) != 0] = number
        return self._fastest_tier_tables[case]

    def _incoming_tiers(self, tags: Tags, without: frozenset[str]) -> TierNumbers:
        """Return the number of the slow tier from which each chunk is being read; 0 if it is not.

        `NO_TIER` stands for a tier that hangs or is excluded. `incoming` must not be empty.
        """
        reads = [
            NO_TIER if slow.name in without or slow.reads.stuck else self._order.index(at) + 1
            for at, slow in enumerate(self.slow_tiers)
        ]
        coming = tags_of(list(self.incoming))
        tier_numbers = np.array([reads[one.source] for one in self.incoming.values()], np.int64)
        order = coming.argsort()
        at = order[coming[order].searchsorted(tags).clip(max=len(order) - 1)]
        return np.where(coming[at] == tags, tier_numbers[at], 0)

    def _reads_in_flight(self) -> int:
        return sum(slow.reads.in_flight for slow in self.slow_tiers)

    def _advance(self, fetch: Fetch) -> None:
        while fetch.remaining and fetch.failure is None and self._advance_chunk(fetch, fetch.remaining[0]):
            fetch.remaining.popleft()

    def _advance_chunk(self, fetch: Fetch, want: PromptChunk) -> bool:
        """Hold one chunk of a fetch, wait for a read of it, or start one. Return False without room."""
        if incoming := self.incoming.get(want.key):
            incoming.waiting.append(fetch)
            fetch.reading[want.key] = want
        elif (slot := self.host.hold(want.key)) is not None:
            self._add_ready(fetch, want, slot, HOST)
        elif sources := [
            at
            for at in self._order
            if self.slow_tiers[at].name not in fetch.without and self.slow_tiers[at].known([want.key])[0]
        ]:
            # Not counted as dropped, because the fetch tries again in the next step.
            slot = self.reserve(want.key, want.group, counted=False)
            if slot is None:
                return False
            group = self._describe_chunk(want.group, want.tokens)
            incoming = _Incoming(slot, group, sources[0], sources[1:], [fetch])
            self.incoming[want.key] = incoming
            fetch.reading[want.key] = want
            self._read(incoming)
        else:
            fetch.failure, fetch.miss = "a chunk has gone since it was offered", GetOutcome.ABSENT
        return True

    def _read(self, incoming: _Incoming) -> None:
        slot = incoming.slot
        into = self._memory_at(slot.offset, slot.size)
        self.slow_tiers[incoming.source].reads.start(slot.key, incoming.group, into)

    def _on_read_ended(self, key: bytes, what: GetOutcome, late: LateFetch | None) -> None:
        """Hand a chunk that was read to the loads that wait for it, or else read it from the next tier.

        After a `late` read, it is read into another slot, from the same tier if that still has it.
        """
        incoming = self.incoming[key]
        name = self.slow_tiers[incoming.source].name
        if what is GetOutcome.HIT:
            self._on_arrived(key, self.incoming.pop(key))
            return
        self.counts.missed[name, what] += 1
        for fetch in incoming.waiting:
            if key in fetch.reading and what is GetOutcome.IO_ERROR:
                fetch.failed.add(name)
        if late is not None:
            self._late[late] = incoming.slot
            if not self._move(incoming):
                del self.incoming[key]
                self._fail(incoming, f"a chunk of the {name} tier: {what}", what)
                return
            # Another engine may have it too.
            if self.slow_tiers[incoming.source].known([key])[0]:
                incoming.others.insert(0, incoming.source)
        if incoming.others:
            incoming.source = incoming.others.pop(0)
            self._read(incoming)
            return
        del self.incoming[key]
        self.host.abort(incoming.slot)
        self._fail(incoming, f"a chunk of the {name} tier: {what}", what)

    def _on_arrived(self, key: bytes, incoming: _Incoming) -> None:
        if not self.host.commit(incoming.slot):
            self._fail(incoming, "the cache was reset")
            return
        # Promotion: the next load finds the chunk in a faster tier, also after host memory has evicted it.
        for slow in self.slow_tiers[: incoming.source]:
            slow.enqueue(key, incoming.group)
            self._to_write[slow.name] = slow
        for fetch in incoming.waiting:
            want = fetch.reading.pop(key, None)
            if want is not None and (slot := self.host.hold(key)) is not None:
                self._add_ready(fetch, want, slot, self.slow_tiers[incoming.source].name)

    def _on_write_ended(self, slow: TierQueue, done: Ended) -> None:
        if done.what is PutOutcome.STORED:
            slow.write_seconds.append(done.seconds)
        elif done.what is PutOutcome.OVER_BUDGET and done.group is not None:
            slow.filter.put_back(done.key, done.group)
        self.host.close(slow.held.pop(done.key))
        self._to_write[slow.name] = slow

    def _move(self, incoming: _Incoming) -> bool:
        """Give a chunk that is being read another slot. Return False after a reset, or without room."""
        old = incoming.slot
        if not self.host.abandon(old) or (new := self.reserve(old.key, old.group, counted=False)) is None:
            return False
        incoming.slot = new
        return True

    def _free_late_slots(self) -> None:
        for late in [late for late in self._late if late.over]:
            self.host.abort(self._late.pop(late))

    def _add_ready(self, fetch: Fetch, want: PromptChunk, slot: Slot, name: str) -> None:
        fetch.ready.append((want, slot))
        fetch.tiers.add(name)
        self.counts.fetched[name] += 1

    def _fail(self, incoming: _Incoming, why: str, what: GetOutcome | None = None) -> None:
        """Record why each waiting load fails, unless it has failed already. `what` is None after a reset."""
        for fetch in incoming.waiting:
            if fetch.reading.pop(incoming.slot.key, None) is not None and fetch.failure is None:
                fetch.failure, fetch.miss = why, what
