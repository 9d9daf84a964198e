"""Chunks on their way between host memory and the slow tiers: writes, and reads for the loads that wait.

    queued ─▶ held, and written ─▶ in the slow tier

    fetch ─▶ hold each chunk in host memory, or read it from the fastest tier that has it; on a miss, the next
             ─▶ in host memory, queued for faster tiers (promotion) ─▶ ready ─▶ (ranks copy)

A chunk that several loads want is read once.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvferry.cache.tier_queue import TierQueue
from kvferry.planning.coverage import NO_TIER, TierNumbers
from kvferry.tiers.format.chunk import ChunkGroup
from kvferry.tiers.host.tier import HostTier, Slot
from kvferry.tiers.index.key_table import MAX_TIERS, Tags, tags_of
from kvferry.tiers.names import HOST, GetOutcome

# Share of host memory in use above which write-back starts to write.
WRITE_BACK_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class WantedChunk:
    """A chunk that a load needs."""

    group: int  # index of the KV cache group
    number: int  # index of the chunk in the prompt
    key: bytes  # key of the chunk in this group
    tokens: int  # number of tokens in the chunk; 0 for a snapshot


@dataclass(slots=True)
class Fetch:
    """The chunks of one load on their way from the tiers to host memory.

    `Reading` moves each chunk from `remaining` to `reading` if a slow tier must be read, and then to `ready`.
    The load takes ready chunks with `take`.
    """

    remaining: deque[WantedChunk] = field(default_factory=deque)  # chunks neither held nor being read
    without: frozenset[str] = frozenset()  # names of tiers that the load must not read from
    reading: dict[bytes, WantedChunk] = field(default_factory=dict)  # chunks that are being read, by key
    # Chunks in host memory, held until the load closes the slot.
    ready: deque[tuple[WantedChunk, Slot]] = field(default_factory=deque)
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
        """Whether the load has no chunk left to wait for: all are ready or taken, or it has failed."""
        return self.failure is not None or not (self.remaining or self.reading)

    def take(self) -> list[tuple[WantedChunk, Slot]]:
        """Remove and return all ready chunks. The caller must close the slots."""
        found = list(self.ready)
        self.ready.clear()
        return found


@dataclass(frozen=True, slots=True)
class SlowTier:
    """A storage tier behind host memory, whose write mode is write-back or write-through."""

    queue: TierQueue
    write_back: bool = False


@dataclass(slots=True)
class Writing:
    """Writes chunks from host memory to one slow tier. Only the engine's thread may use it."""

    slow_tier: SlowTier
    host: HostTier
    slot_memory: Callable[[Slot], memoryview]
    lost: int = 0  # number of queued chunks that host memory evicted before their write started
    # Chunks still to be written, the oldest first: (description, cold) by key.
    queued: OrderedDict[bytes, tuple[ChunkGroup, bool]] = field(default_factory=OrderedDict)
    # Slots of the chunks that are being written, by key.
    held: dict[bytes, Slot] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of chunks that are queued or being written."""
        return len(self.queued) + len(self.held)

    def enqueue(self, key: bytes, group: ChunkGroup, *, cold: bool = False) -> None:
        """Queue a chunk in host memory for writing, unless the tier has the chunk or is writing it."""
        if key not in self.held and not self.slow_tier.queue.tier.contains([key])[0]:
            self.queued[key] = group, cold

    @property
    def busy(self) -> bool:
        """Whether chunks are being written, or are queued and should be written.

        It is False while the tier's writes hang. In write-back mode, chunks need not be written while host
        memory has room.
        """
        waits = bool(self.held) or (bool(self.queued) and self._may_write)
        return waits and not self.slow_tier.queue.writes.stuck

    def pump(self) -> int:
        """Start as many writes as tier and write mode allow; return how many chunks left the queue."""
        if not (before := len(self.queued)):
            return 0
        while self.queued and self._may_write and self.slow_tier.queue.can_write:
            self._write_next()
        return before - len(self.queued)

    def on_write_ended(self, key: bytes) -> None:
        """Release the slot of a chunk whose write has ended, whatever the outcome."""
        self.host.close(self.held.pop(key))

    def flush(self) -> None:
        """Start the writes of all queued chunks, whatever the write mode and the tier's limit on writes."""
        while self.queued:
            self._write_next()

    @property
    def _may_write(self) -> bool:
        full = self.host.used_bytes > WRITE_BACK_SHARE * self.host.capacity_bytes
        return full or not self.slow_tier.write_back

    def _write_next(self) -> None:
        """Start the write of the oldest queued chunk, or count it as lost if host memory has evicted it."""
        key, (group, cold) = self.queued.popitem(last=False)
        slot = self.host.hold(key)
        if slot is None:
            self.lost += 1
            return
        self.held[key] = slot
        self.slow_tier.queue.write(key, group, self.slot_memory(slot), cold=cold)


@dataclass(slots=True)
class CacheCounts:
    """Counts of chunks of a tiered cache since its start."""

    # Chunks that ranks have copied, or failed to copy, to host memory.
    stored: int = 0
    failed: int = 0
    # Chunks made ready for a load, by name of the tier that they came from.
    fetched: Counter[str] = field(default_factory=Counter)
    # Reads that did not return the chunk although the tier listed it, by name of the tier and outcome.
    missed: Counter[tuple[str, GetOutcome]] = field(default_factory=Counter)


@dataclass(slots=True)
class TransferTimes:
    """Seconds that each successful read and write took, by name of the tier."""

    reads: dict[str, list[float]] = field(default_factory=dict)
    writes: dict[str, list[float]] = field(default_factory=dict)


@dataclass(slots=True)
class _Incoming:
    """A chunk that is being read into host memory."""

    slot: Slot
    group: ChunkGroup
    source: int  # index of the slow tier that the chunk is read from
    others: list[int]  # indices of the slow tiers to try if this read fails, the fastest first
    waiting: list[Fetch]


class Reading:
    """Reads chunks from storage into host memory. Only the engine's thread may use it.

    Args:
        writing: write queues of the slow tiers, the fastest tier first.
        slot_memory: return the writable memory of a slot.
        describe_chunk: return the description of a chunk's content for storage, from the index of its group
            and its number of tokens.
        counts: statistics in which fetched and missed chunks are counted. Mutated.

    Attributes:
        incoming: chunks that are being read, by key.
        events: counter that increases when `fetch` or `advance` may have changed the statistics.
            `on_read_ended` changes them too, but its caller counts these changes.
    """

    def __init__(
        self,
        host: HostTier,
        writing: Sequence[Writing],
        slot_memory: Callable[[Slot], memoryview],
        describe_chunk: Callable[[int, int], ChunkGroup],
        counts: CacheCounts,
    ) -> None:
        self.incoming: dict[bytes, _Incoming] = {}
        self.fetches: list[Fetch] = []
        self.events = 0
        self._host, self._writing = host, writing
        self._slot_memory, self._describe_chunk = slot_memory, describe_chunk
        self._queues = [one.slow_tier.queue for one in writing]
        self._fastest_tier_tables: dict[tuple[bool, ...], TierNumbers] = {}
        self._counts = counts

    def tier_numbers(self, tags: Tags, without: Iterable[str] = ()) -> TierNumbers:
        """Return the number of the tier from which each chunk would be read now: int64 of shape (len(tags),).

        It is 0 for host memory, n for the n-th slow tier, and `NO_TIER` for none. If the chunk is already
        being read for another load, it is that of the slow tier from which it is being read, or `NO_TIER` if
        that tier hangs or is excluded.
        """
        names = frozenset(without)
        allowed = (True, *(queue.name not in names and not queue.refuses_reads for queue in self._queues))
        found = self._fastest_tier_table(allowed).take(self._host.keys.table.tier_bits(tags))
        if self.incoming:
            coming = np.maximum(found, self._incoming_tiers(tags, names))
            found = np.where((found > 0) & (found < NO_TIER), coming, found)
        return found

    def fetch(self, wanted_chunks: Iterable[WantedChunk], without: Iterable[str] = ()) -> Fetch:
        """Start to read chunks into host memory for a load, in their order. `advance` continues it.

        A chunk in host memory is held until the load closes its slot. `without` are names of tiers to
        exclude.
        """
        self.events += 1
        fetch = Fetch(without=frozenset(without))
        # Hold all that host memory has before any read starts, which may evict to make room.
        for want in wanted_chunks:
            slot = self._host.open(want.key)
            if slot is None:
                fetch.remaining.append(want)
            else:
                self._add_ready(fetch, want, slot, HOST)
        self.fetches.append(fetch)
        self._advance(fetch)
        return fetch

    def cancel(self, fetch: Fetch) -> None:
        """Cancel a fetch and release its slots. The chunks of reads in flight still get into host memory."""
        for _, slot in fetch.take():
            self._host.close(slot)
        fetch.remaining.clear()
        fetch.reading.clear()

    def awaited_tiers(self, fetch: Fetch) -> set[str]:
        """Return the names of the slow tiers from which chunks of a fetch are still being read."""
        return {self._queues[self.incoming[key].source].name for key in fetch.reading}

    def origin(self, fetch: Fetch) -> str:
        """Return the name of the slowest tier from which chunks of a fetch have been or are being read."""
        names = self.awaited_tiers(fetch) | fetch.tiers
        return next((queue.name for queue in reversed(self._queues) if queue.name in names), HOST)

    def on_read_ended(self, key: bytes, what: GetOutcome) -> None:
        """Hand a chunk that was read to the loads that wait for it; or else read it from the next tier.

        If no other slow tier lists it, the loads fail.
        """
        incoming = self.incoming[key]
        name = self._queues[incoming.source].name
        if what is GetOutcome.HIT:
            del self.incoming[key]
            if not self._host.commit(incoming.slot):
                self._fail(incoming, "the cache was reset")
                return
            # Promotion: the next load finds the chunk in a faster tier, also after host memory has evicted
            # it.
            for writing in self._writing[: incoming.source]:
                writing.enqueue(key, incoming.group)
            for fetch in incoming.waiting:
                want = fetch.reading.pop(key, None)
                if want is not None and (slot := self._host.hold(key)) is not None:
                    self._add_ready(fetch, want, slot, name)
            return
        self._counts.missed[name, what] += 1
        for fetch in incoming.waiting:
            if key in fetch.reading and what is GetOutcome.IO_ERROR:
                fetch.failed.add(name)
        if incoming.others:
            incoming.source = incoming.others.pop(0)
            self._read(incoming)
            return
        del self.incoming[key]
        self._host.abort(incoming.slot)
        self._fail(incoming, f"a chunk of the {name} tier: {what}", what)

    def advance(self) -> None:
        """Continue all fetches as far as host memory has room, and remove finished ones."""
        self.events += bool(self.fetches)
        for fetch in self.fetches:
            self._advance(fetch)
        self.fetches = [fetch for fetch in self.fetches if not fetch.over]

    def _fastest_tier_table(self, allowed: tuple[bool, ...]) -> TierNumbers:
        """Return a table that maps `KeyTable.tier_bits` to the number of the fastest allowed tier among them.

        It is int64 of shape (1 << MAX_TIERS,), with `NO_TIER` for none. `allowed` is by tier number.
        """
        if allowed not in self._fastest_tier_tables:
            marks = np.arange(1 << MAX_TIERS)
            found = self._fastest_tier_tables[allowed] = np.full(len(marks), NO_TIER)
            bits = [self._host.keys.bit, *(queue.tier.keys.bit for queue in self._queues)]
            for number in reversed(range(len(bits))):
                if allowed[number]:
                    found[(marks & bits[number]) != 0] = number
        return self._fastest_tier_tables[allowed]

    def _incoming_tiers(self, tags: Tags, without: frozenset[str]) -> TierNumbers:
        """Return the number of the slow tier from which each chunk is being read; 0 if it is not.

        `NO_TIER` stands for a tier that hangs or is excluded. `incoming` must not be empty.
        """
        reads = [
            NO_TIER if queue.name in without or queue.reads.stuck else number
            for number, queue in enumerate(self._queues, 1)
        ]
        coming = tags_of(list(self.incoming))
        tier_numbers = np.array([reads[one.source] for one in self.incoming.values()], np.int64)
        order = coming.argsort()
        at = order[coming[order].searchsorted(tags).clip(max=len(order) - 1)]
        return np.where(coming[at] == tags, tier_numbers[at], 0)

    def _advance(self, fetch: Fetch) -> None:
        while fetch.remaining and fetch.failure is None and self._advance_chunk(fetch, fetch.remaining[0]):
            fetch.remaining.popleft()

    def _advance_chunk(self, fetch: Fetch, want: WantedChunk) -> bool:
        """Hold one chunk of a fetch, wait for a read of it, or start one. Return False without room for it.

        If no tier has the chunk any more, the fetch fails.
        """
        if incoming := self.incoming.get(want.key):
            incoming.waiting.append(fetch)
            fetch.reading[want.key] = want
        elif (slot := self._host.hold(want.key)) is not None:
            self._add_ready(fetch, want, slot, HOST)
        elif sources := [
            number
            for number, queue in enumerate(self._queues)
            if queue.name not in fetch.without and queue.known([want.key])[0]
        ]:
            # Not counted as dropped, because the fetch tries again in the next step.
            slot = self._host.reserve(want.key, want.group, counted=False)
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
        self._queues[incoming.source].read(slot.key, incoming.group, self._slot_memory(slot))

    def _add_ready(self, fetch: Fetch, want: WantedChunk, slot: Slot, name: str) -> None:
        """Add a chunk that is held for a fetch to its ready chunks. It came from the tier `name`."""
        fetch.ready.append((want, slot))
        fetch.tiers.add(name)
        self._counts.fetched[name] += 1

    def _fail(self, incoming: _Incoming, why: str, what: GetOutcome | None = None) -> None:
        """Record why each waiting load fails, unless it has failed already. `what` is None after a reset."""
        for fetch in incoming.waiting:
            if fetch.reading.pop(incoming.slot.key, None) is not None and fetch.failure is None:
                fetch.failure, fetch.miss = why, what
