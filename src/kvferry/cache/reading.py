"""Reads of chunks from slow tiers into host memory, and the loads that wait for them.

    fetch ─▶ hold each chunk in host memory, or read it from the fastest tier that has it; on a miss, the next
             ─▶ in host memory, queued for faster tiers (promotion) ─▶ ready ─▶ (ranks copy)

A chunk that several loads want is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.cache.counts import CacheCounts
from kvferry.cache.fetch import Fetch, WantedChunk
from kvferry.cache.writing import Writing
from kvferry.planning.coverage import NO_TIER, TierNumbers
from kvferry.tiers.format.chunk import ChunkGroup
from kvferry.tiers.host.tier import HostTier, Slot
from kvferry.tiers.index.key_table import MAX_TIERS, Tags, tags_of
from kvferry.tiers.names import HOST
from kvferry.tiers.outcome import GetOutcome


@dataclass(slots=True)
class _Incoming:
    """A chunk that is being read into host memory.

    Attributes:
        slot: the slot that is filled.
        group: the chunk-file group of the chunk.
        source: index of the slow tier that it is read from.
        others: indices of the slow tiers to try next.
        waiting: fetches that want it.
    """

    slot: Slot
    group: ChunkGroup
    source: int
    others: list[int]
    waiting: list[Fetch]


class Reading:
    """Reads of chunks from storage to host memory. Only the engine's thread calls it.

    Attributes:
        incoming: chunks that are being read, by key.
        fetches: fetches that are not over.
        events: number of operations so far.
    """

    def __init__(
        self,
        host: HostTier,
        writing: Sequence[Writing],
        body: Callable[[Slot], memoryview],
        file: Callable[[int, int], ChunkGroup],
        counts: CacheCounts,
    ) -> None:
        """Create it without reads.

        Args:
            host: the host tier that chunks are read into.
            writing: the writes of every slow tier, the fastest first.
            body: function from a slot to its writable memory.
            file: function from a group's number and a number of tokens to the chunk-file group.
            counts: counts of the cache, which are updated.
        """
        self.incoming: dict[bytes, _Incoming] = {}
        self.fetches: list[Fetch] = []
        self.events = 0
        self._host, self._writing, self._body, self._file = host, writing, body, file
        self._queues = [one.slow_tier.queue for one in writing]
        self._firsts: dict[tuple[bool, ...], TierNumbers] = {}
        self._counts = counts

    def tier_numbers(self, tags: Tags, without: Iterable[str] = ()) -> TierNumbers:
        """Return the tier that each chunk would come from now: int64 of shape (len(tags),).

        0 stands for host memory, n for the n-th slow tier, `NO_TIER` for none. A chunk that is being read
        comes from the tier that it is read from, or from none if that tier is stuck or left out.

        Args:
            tags: tags of chunk keys.
            without: names of tiers to leave out.
        """
        names = frozenset(without)
        asked = (True, *(queue.name not in names and not queue.refuses_reads for queue in self._queues))
        found = self._first_of(asked).take(self._host.keys.table.tier_bits(tags))
        if self.incoming:
            coming = np.maximum(found, self._coming(tags, names))
            found = np.where((found > 0) & (found < NO_TIER), coming, found)
        return found

    def fetch(self, wanted_chunks: Iterable[WantedChunk], without: Iterable[str] = ()) -> Fetch:
        """Start to bring chunks to host memory and hold them there. `advance` continues the returned fetch.

        Chunks in host memory are held first, before room for others is made there.

        Args:
            wanted_chunks: chunks, in the order in which they are looked up.
            without: names of tiers to leave out.
        """
        self.events += 1
        fetch = Fetch(without=frozenset(without))
        for want in wanted_chunks:
            slot = self._host.open(want.key)
            if slot is None:
                fetch.remaining.append(want)
            else:
                self._give(fetch, want, slot, HOST)
        self.fetches.append(fetch)
        self._advance(fetch)
        return fetch

    def cancel(self, fetch: Fetch) -> None:
        """Cancel a fetch and release its slots. Chunks that are being read still go to host memory."""
        for _, slot in fetch.take():
            self._host.close(slot)
        fetch.remaining.clear()
        fetch.reading.clear()

    def awaited_tiers(self, fetch: Fetch) -> set[str]:
        """Return the names of the tiers that a fetch still waits for."""
        return {self._queues[self.incoming[key].source].name for key in fetch.reading}

    def origin(self, fetch: Fetch) -> str:
        """Return the name of the slowest tier that a fetch has used so far; host memory if none."""
        asked = self.awaited_tiers(fetch) | fetch.tiers
        return next((queue.name for queue in reversed(self._queues) if queue.name in asked), HOST)

    def on_read_ended(self, key: bytes, what: GetOutcome) -> None:
        """Process the end of a read: keep the chunk, or read it from the next tier if there is one."""
        incoming = self.incoming[key]
        name = self._queues[incoming.source].name
        if what is GetOutcome.HIT:
            del self.incoming[key]
            self._keep(incoming, name)
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
        """Continue all fetches as far as host memory has room."""
        self.events += bool(self.fetches)
        for fetch in self.fetches:
            self._advance(fetch)
        self.fetches = [fetch for fetch in self.fetches if not fetch.over]

    def _first_of(self, asked: tuple[bool, ...]) -> TierNumbers:
        """Return a table from the tier bits of a tag to its fastest tier, among those marked in `asked`."""
        if asked not in self._firsts:
            marks = np.arange(1 << MAX_TIERS)
            found = self._firsts[asked] = np.full(len(marks), NO_TIER)
            bits = [self._host.keys.bit, *(queue.tier.keys.bit for queue in self._queues)]
            for place in reversed(range(len(bits))):
                if asked[place]:
                    found[(marks & bits[place]) != 0] = place
        return self._firsts[asked]

    def _coming(self, tags: Tags, without: frozenset[str]) -> TierNumbers:
        """Return the tier that each chunk is being read from, as in `tier_numbers`; 0 if it is none."""
        reads = [
            NO_TIER if queue.name in without or queue.stuck_for_reading else number
            for number, queue in enumerate(self._queues, 1)
        ]
        coming = tags_of(list(self.incoming))
        tier_numbers = np.array([reads[one.source] for one in self.incoming.values()], np.int64)
        order = coming.argsort()
        at = order[coming[order].searchsorted(tags).clip(max=len(order) - 1)]
        return np.where(coming[at] == tags, tier_numbers[at], 0)

    def _advance(self, fetch: Fetch) -> None:
        """Hold or read the remaining chunks of a fetch as far as host memory has room."""
        while fetch.remaining and fetch.failure is None and self._bring(fetch, fetch.remaining[0]):
            fetch.remaining.popleft()

    def _bring(self, fetch: Fetch, want: WantedChunk) -> bool:
        """Hold a chunk of host memory, or start its read; return False if there is no room for it yet."""
        if incoming := self.incoming.get(want.key):
            incoming.waiting.append(fetch)
            fetch.reading[want.key] = want
        elif (slot := self._host.hold(want.key)) is not None:
            self._give(fetch, want, slot, HOST)
        elif sources := self._sources(fetch, want.key):
            slot = self._host.reserve(want.key, want.group, counted=False)
            if slot is None:
                return False
            group = self._file(want.group, want.tokens)
            incoming = _Incoming(slot, group, sources[0], sources[1:], [fetch])
            self.incoming[want.key] = incoming
            fetch.reading[want.key] = want
            self._read(incoming)
        else:
            fetch.failure, fetch.miss = "a chunk has gone since it was offered", GetOutcome.ABSENT
        return True

    def _sources(self, fetch: Fetch, key: bytes) -> list[int]:
        """Return the indices of the slow tiers that should have a chunk, the fastest first."""
        return [
            number
            for number, queue in enumerate(self._queues)
            if queue.name not in fetch.without and queue.known([key])[0]
        ]

    def _read(self, incoming: _Incoming) -> None:
        slot = incoming.slot
        self._queues[incoming.source].read(slot.key, incoming.group, self._body(slot))

    def _keep(self, incoming: _Incoming, name: str) -> None:
        key = incoming.slot.key
        if not self._host.commit(incoming.slot):
            self._fail(incoming, "the cache was reset")
            return
        for writing in self._writing[: incoming.source]:
            writing.owe(key, incoming.group)
        for fetch in incoming.waiting:
            want, slot = fetch.reading.pop(key, None), None
            if want is not None and (slot := self._host.hold(key)) is not None:
                self._give(fetch, want, slot, name)

    def _give(self, fetch: Fetch, want: WantedChunk, slot: Slot, name: str) -> None:
        fetch.ready.append((want, slot))
        fetch.tiers.add(name)
        self._counts.fetched[name] += 1

    def _fail(self, incoming: _Incoming, why: str, what: GetOutcome | None = None) -> None:
        for fetch in incoming.waiting:
            if fetch.reading.pop(incoming.slot.key, None) is not None and fetch.failure is None:
                fetch.failure, fetch.miss = why, what
