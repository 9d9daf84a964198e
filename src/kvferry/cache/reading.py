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
        slot: slot (memory of one chunk) in host memory that the read fills.
        group: description of the content: KV cache group, number of tokens and layout.
        source: index of the slow tier that the chunk is read from.
        others: indices of the slow tiers to try if this read fails, the fastest first.
        waiting: fetches (sets of chunks that one load needs) that wait for the chunk.
    """

    slot: Slot
    group: ChunkGroup
    source: int
    others: list[int]
    waiting: list[Fetch]


class Reading:
    """Reads chunks from storage into host memory. Only the engine's thread may use it.

    Attributes:
        incoming: chunks that are being read, by key.
        fetches: fetches in progress. A fetch is the set of chunks that one load needs.
        events: counter that increases when `fetch` or `advance` may have changed the cache's statistics.
            `on_read_ended` also changes the statistics but not this counter; its caller counts these changes.
    """

    def __init__(
        self,
        host: HostTier,
        writing: Sequence[Writing],
        slot_memory: Callable[[Slot], memoryview],
        describe_chunk: Callable[[int, int], ChunkGroup],
        counts: CacheCounts,
    ) -> None:
        """Create the reader of a cache, with no read in flight.

        Args:
            host: host tier that chunks are read into.
            writing: write queues of the slow tiers, the fastest tier first. A chunk that was read from one
                tier is queued for all faster ones.
            slot_memory: function that returns the writable memory of a slot (space of one chunk in host
                memory).
            describe_chunk: function that takes the index of a KV cache group and the number of tokens in a
                chunk, and returns the description of the chunk's content for storage.
            counts: statistics of the cache, in which fetched and missed chunks are counted. Mutated.
        """
        self.incoming: dict[bytes, _Incoming] = {}
        self.fetches: list[Fetch] = []
        self.events = 0
        self._host, self._writing, self._slot_memory, self._describe_chunk = (
            host,
            writing,
            slot_memory,
            describe_chunk,
        )
        self._queues = [one.slow_tier.queue for one in writing]
        self._fastest_tier_tables: dict[tuple[bool, ...], TierNumbers] = {}
        self._counts = counts

    def tier_numbers(self, tags: Tags, without: Iterable[str] = ()) -> TierNumbers:
        """Return, for each chunk, the number that identifies the tier from which it would be read now.

        The number is 0 for host memory, n for the n-th slow tier, and `NO_TIER` for none. If the chunk is
        already being read for another load, the number is that of the slow tier from which it is being read,
        or `NO_TIER` if that tier hangs or is excluded.

        Args:
            tags: tags (last 8 bytes) of the chunks' keys, uint64, as `tags_of` returns them.
            without: names of tiers to exclude.

        Returns:
            Tier numbers, int64 of shape (len(tags),).
        """
        names = frozenset(without)
        allowed = (True, *(queue.name not in names and not queue.refuses_reads for queue in self._queues))
        found = self._fastest_tier_table(allowed).take(self._host.keys.table.tier_bits(tags))
        if self.incoming:
            coming = np.maximum(found, self._incoming_tiers(tags, names))
            found = np.where((found > 0) & (found < NO_TIER), coming, found)
        return found

    def fetch(self, wanted_chunks: Iterable[WantedChunk], without: Iterable[str] = ()) -> Fetch:
        """Start to read chunks into host memory for a load. `advance` continues the returned fetch.

        A chunk in host memory is held (not evicted) until the load closes the chunk's slot (memory of one
        chunk). Chunks that are in host memory already are held before any read starts, so that they are not
        evicted to make room.

        Args:
            wanted_chunks: chunks that the load needs, in the order in which to read them.
            without: names of tiers to exclude.
        """
        self.events += 1
        fetch = Fetch(without=frozenset(without))
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
        """Cancel a fetch and release its slots (memory of chunks) in host memory.

        Reads in flight continue, and their chunks stay in host memory until they are evicted.

        Args:
            fetch: set of chunks that one load needs.
        """
        for _, slot in fetch.take():
            self._host.close(slot)
        fetch.remaining.clear()
        fetch.reading.clear()

    def awaited_tiers(self, fetch: Fetch) -> set[str]:
        """Return the names of the slow tiers from which chunks of a fetch are still being read.

        Args:
            fetch: set of chunks that one load needs.
        """
        return {self._queues[self.incoming[key].source].name for key in fetch.reading}

    def origin(self, fetch: Fetch) -> str:
        """Return the name of the slowest tier from which chunks of a fetch have been or are being read.

        If no slow tier is read, return the name of the host tier.

        Args:
            fetch: set of chunks that one load needs.
        """
        names = self.awaited_tiers(fetch) | fetch.tiers
        return next((queue.name for queue in reversed(self._queues) if queue.name in names), HOST)

    def on_read_ended(self, key: bytes, what: GetOutcome) -> None:
        """Process the end of a read from a slow tier.

        After a hit, the chunk becomes ready for the loads that wait for it. After any other outcome, the
        chunk is read from the next slow tier that lists it. If there is no such tier, the loads fail.

        Args:
            key: key of the chunk.
            what: outcome of the read.
        """
        incoming = self.incoming[key]
        name = self._queues[incoming.source].name
        if what is GetOutcome.HIT:
            del self.incoming[key]
            self._commit_read(incoming, name)
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
        """Continue all fetches as far as host memory has room, and remove finished ones from `fetches`.

        A fetch is the set of chunks that one load needs.
        """
        self.events += bool(self.fetches)
        for fetch in self.fetches:
            self._advance(fetch)
        self.fetches = [fetch for fetch in self.fetches if not fetch.over]

    def _fastest_tier_table(self, allowed: tuple[bool, ...]) -> TierNumbers:
        """Return a table that maps a set of tiers to the number of the fastest allowed tier in the set.

        The table is int64 of shape (1 << MAX_TIERS,). Its index is the bit mask of a set of tiers, as
        `KeyTable.tier_bits` returns it. An entry is `NO_TIER` if no tier of its set is allowed.

        Args:
            allowed: whether each tier may be read, by tier number: host memory first, then the slow tiers.
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
        """Return, for each chunk, the number that identifies the slow tier from which it is being read.

        The entry is 0 if the chunk is not being read, and `NO_TIER` if it is being read from a tier that
        hangs or is excluded. At least one chunk must be in `incoming`.

        Args:
            tags: tags (last 8 bytes) of the chunks' keys, uint64.
            without: names of tiers to exclude.

        Returns:
            Tier numbers, int64 of shape (len(tags),).
        """
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
        """Continue a fetch as far as host memory has room, one remaining chunk after the other.

        A chunk in host memory is held (not evicted). For other chunks, a read is started.

        Args:
            fetch: set of chunks that one load needs.
        """
        while fetch.remaining and fetch.failure is None and self._advance_chunk(fetch, fetch.remaining[0]):
            fetch.remaining.popleft()

    def _advance_chunk(self, fetch: Fetch, want: WantedChunk) -> bool:
        """Bring one chunk of a fetch towards host memory.

        A chunk in host memory is held (not evicted). If another load is already reading the chunk, the fetch
        waits for this read. Otherwise a read is started. If no tier has the chunk any more, the fetch fails.

        Args:
            fetch: set of chunks that one load needs.
            want: chunk of this set to bring to host memory.

        Returns:
            False if host memory has no room for the chunk yet, so that the fetch must try again later.
        """
        if incoming := self.incoming.get(want.key):
            incoming.waiting.append(fetch)
            fetch.reading[want.key] = want
        elif (slot := self._host.hold(want.key)) is not None:
            self._add_ready(fetch, want, slot, HOST)
        elif sources := self._sources(fetch, want.key):
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

    def _sources(self, fetch: Fetch, key: bytes) -> list[int]:
        """Return the indices of the slow tiers from which a chunk can be read, the fastest first.

        Args:
            fetch: set of chunks that one load needs, with the names of tiers to exclude.
            key: key of the chunk.
        """
        return [
            number
            for number, queue in enumerate(self._queues)
            if queue.name not in fetch.without and queue.known([key])[0]
        ]

    def _read(self, incoming: _Incoming) -> None:
        """Start to read a chunk from its source tier into its slot (memory of one chunk in host memory)."""
        slot = incoming.slot
        self._queues[incoming.source].read(slot.key, incoming.group, self._slot_memory(slot))

    def _commit_read(self, incoming: _Incoming, name: str) -> None:
        """Make a chunk readable after its read, and hand it to the loads that wait for it.

        The chunk is also queued for writing to all faster tiers. If the cache was reset during the read, the
        loads fail instead.

        Args:
            incoming: chunk whose read has ended with a hit.
            name: name of the tier that the chunk came from.
        """
        key = incoming.slot.key
        if not self._host.commit(incoming.slot):
            self._fail(incoming, "the cache was reset")
            return
        for writing in self._writing[: incoming.source]:
            writing.enqueue(key, incoming.group)
        for fetch in incoming.waiting:
            want, slot = fetch.reading.pop(key, None), None
            if want is not None and (slot := self._host.hold(key)) is not None:
                self._add_ready(fetch, want, slot, name)

    def _add_ready(self, fetch: Fetch, want: WantedChunk, slot: Slot, name: str) -> None:
        """Add a chunk in host memory to the ready chunks of a fetch.

        Args:
            fetch: set of chunks that one load needs.
            want: the chunk.
            slot: host memory of the chunk, which is held (not evicted) for this fetch.
            name: name of the tier that the chunk came from.
        """
        fetch.ready.append((want, slot))
        fetch.tiers.add(name)
        self._counts.fetched[name] += 1

    def _fail(self, incoming: _Incoming, why: str, what: GetOutcome | None = None) -> None:
        """Record the failure of every load that waits for a chunk that could not be read.

        If a load has failed already, its first reason is kept.

        Args:
            incoming: chunk that could not be read.
            why: reason for the failure, for messages.
            what: outcome of the read; None if the chunk was read but the cache was reset meanwhile.
        """
        for fetch in incoming.waiting:
            if fetch.reading.pop(incoming.slot.key, None) is not None and fetch.failure is None:
                fetch.failure, fetch.miss = why, what
