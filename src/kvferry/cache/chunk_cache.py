"""The tiered cache of one engine, for the thread that schedules: chunks by key, in host memory and behind it.

Host memory is where every chunk passes: ranks copy between it and their blocks, threads copy between it and
storage.

    store   reserve ─▶ (ranks copy) ─▶ filled ─▶ in host memory, and owed to every slow tier (`writing`)
    load    fetch ─▶ each chunk held where it is, or read from the first tier that has it, which keeps it
            in host memory and owes it to faster tiers (promotion) ─▶ ready ─▶ (ranks copy) ─▶ close

Nothing here blocks, and nothing raises for what a tier does.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvferry.cache.fetch import Fetch, Want
from kvferry.cache.tier_queue import Read
from kvferry.cache.writing import Behind, Writing
from kvferry.geometry.canonical import CanonicalGroup
from kvferry.planning.coverage import NOWHERE, Places
from kvferry.tiers.counters import Miss as HostMiss
from kvferry.tiers.format import Group
from kvferry.tiers.host import HostTier, Slot
from kvferry.tiers.image import group_of
from kvferry.tiers.names import HOST
from kvferry.tiers.outcome import Get, Put
from kvferry.tiers.tags import MOST_PLACES, Uint64s, tags_of


@dataclass(slots=True)
class CacheCounts:
    """What the cache has done, besides what each tier counts.

    Attributes:
        stored: chunks that ranks have filled.
        failed: chunks that they could not.
        fetched: chunks that loads took, by tier.
        missed: chunks that a tier should have had and did not give, by tier and reason.
        read_seconds, write_seconds: of chunks that slow tiers have given or taken, by tier; whoever looks
            takes them.
    """

    stored: int = 0
    failed: int = 0
    fetched: Counter[str] = field(default_factory=Counter)
    missed: Counter[tuple[str, Get]] = field(default_factory=Counter)
    read_seconds: dict[str, list[float]] = field(default_factory=dict)
    write_seconds: dict[str, list[float]] = field(default_factory=dict)


@dataclass(slots=True)
class _Incoming:
    """A chunk that is being read into host memory.

    Attributes:
        slot: where to.
        group: what it is as a file.
        source: number of the tier that it is read from.
        others: tiers that are asked next.
        waiting: fetches that want it.
    """

    slot: Slot
    group: Group
    source: int
    others: list[int]
    waiting: list[Fetch]


class ChunkCache:
    """See the module. Not thread-safe.

    Attributes:
        counts: what it has done.
        writing: what every slow tier is owed, the fastest first.
        events: how often something was done; no count has changed while this has not.
    """

    def __init__(
        self,
        host: HostTier,
        body: Callable[[int, int], memoryview],
        groups: Sequence[CanonicalGroup],
        behind: Sequence[Behind] = (),
    ) -> None:
        """Begin with what the slow tiers have.

        Args:
            host: empty, from here on nobody else's.
            body: memory of the arena by offset and size in bytes, writable.
            groups: what chunks hold.
            behind: slow tiers, the fastest first; taken over.

        Raises:
            ValueError: the tiers do not share a table of tags.
        """
        if any(one.queue.tier.tags.table is not host.tags.table for one in behind):
            raise ValueError("tiers of one cache share a table of tags")
        self.counts, self.events = CacheCounts(), 0
        self._host = host
        self._memory, self._groups = body, tuple(groups)
        self._files: dict[tuple[int, int], Group] = {}
        self.writing = tuple(Writing(one, host, self._body) for one in behind)
        self._queues = [one.queue for one in behind]
        self._firsts: dict[tuple[bool, ...], Places] = {}
        self._incoming: dict[bytes, _Incoming] = {}
        self._fetches: list[Fetch] = []

    @property
    def busy(self) -> bool:
        """Coming steps have something to do: a load waits for chunks, or some are to be written or just are.

        A chunk that is read and nobody waits for is heard of in whichever step comes next.
        """
        return bool(self._fetches) or any(writing.due or writing.under_way for writing in self.writing)

    @property
    def host(self) -> HostTier:
        """To look at, not to change."""
        return self._host

    def why_missed(self, key: bytes) -> HostMiss:
        """Why a chunk is not at hand, as far as that is remembered; "absent" of one that was never here."""
        why = self._host.why_missed(key)
        if why is HostMiss.ABSENT and any(queue.tier.had(key) for queue in self._queues):
            return HostMiss.EVICTED
        return why

    @property
    def stranger(self) -> str:
        """A namespace of a model of the same name, in a place where there is nothing of this one's."""
        return next((queue.around.stranger for queue in self._queues if queue.around.stranger), "")

    def at_hand(self, keys: Sequence[bytes], without: Iterable[str] = ()) -> npt.NDArray[np.bool_]:
        """Which chunks could be loaded now: bool of shape (len(keys),).

        Args:
            keys: of chunks.
            without: names of tiers that are not asked.
        """
        return self.places(tags_of(keys), without) < NOWHERE

    @property
    def tiers(self) -> list[str]:
        """Names of the slow tiers, the fastest first."""
        return [queue.name for queue in self._queues]

    def places(self, tags: Uint64s, without: Iterable[str] = ()) -> Places:
        """Where chunks would come from now: int64 of shape (len(tags),).

        0 for host memory, n for the n-th tier, `NOWHERE` for none. What a tier is reading comes from that
        one; of a tier that is stuck or not asked nobody should join in waiting.

        Args:
            tags: of chunks' keys.
            without: names of tiers that are not asked.
        """
        names = frozenset(without)
        asked = (True, *(queue.name not in names and not queue.unread for queue in self._queues))
        found = self._first_of(asked).take(self._host.tags.table.marks(tags))
        if self._incoming:
            coming = np.maximum(found, self._coming(tags, names))
            found = np.where((found > 0) & (found < NOWHERE), coming, found)
        return found

    def reserve(self, key: bytes, group: int) -> Slot | None:
        """Room for a chunk that ranks will fill; None if there is none, which is counted."""
        self.events += 1
        return self._host.reserve(key, group)

    def filled(self, slot: Slot, tokens: int, failure: str | None) -> None:
        """Ranks have filled a slot, or could not, and touch it no more.

        Args:
            slot: of `reserve`.
            tokens: that the chunk holds; 0 of a snapshot.
            failure: why they could not, None if they have.
        """
        self.events += 1
        if failure is not None:
            self.counts.failed += 1
            self._host.abort(slot)
        elif self._host.commit(slot):
            self.counts.stored += 1
            for writing in self.writing:
                writing.owe(slot.key, self._file(slot.group, tokens))

    def fetch(self, wants: Iterable[Want], without: Iterable[str] = ()) -> Fetch:
        """Bring chunks to host memory and hold them there; `poll` goes on with what this returns.

        What is in host memory is held first, before room for others is made there.

        Args:
            wants: in the order in which they are looked for.
            without: names of tiers that are not asked.
        """
        self.events += 1
        fetch = Fetch(without=frozenset(without))
        for want in wants:
            slot = self._host.open(want.key)
            if slot is None:
                fetch.left.append(want)
            else:
                self._give(fetch, want, slot, HOST)
        self._fetches.append(fetch)
        self._advance(fetch)
        return fetch

    def close(self, slot: Slot) -> None:
        """A load is done with a chunk that it had."""
        self._host.close(slot)

    def used(self, keys: Sequence[bytes]) -> None:
        """A prompt was used, with all of its chunks, wherever they were taken from: its end shall go first.

        Args:
            keys: of its chunks, from its beginning on, kept or not.
        """
        self._host.used(keys)
        for queue in self._queues:
            queue.used(keys)

    def cancel(self, fetch: Fetch) -> None:
        """Nothing more is wanted: what was held is let go; what is being read is kept when it comes."""
        for _, slot in fetch.take():
            self._host.close(slot)
        fetch.left.clear()
        fetch.coming.clear()

    def awaited(self, fetch: Fetch) -> set[str]:
        """Names of the tiers that have not answered a fetch yet."""
        return {self._queues[self._incoming[key].source].name for key in fetch.coming}

    def origin(self, fetch: Fetch) -> str:
        """The slowest tier that a fetch asks so far; host memory if none."""
        asked = self.awaited(fetch) | fetch.tiers
        return next((queue.name for queue in reversed(self._queues) if queue.name in asked), HOST)

    def poll(self) -> None:
        """Hear what threads have done, and give them more to do; once per step."""
        for queue, writing in zip(self._queues, self.writing, strict=True):
            for done in queue.done():
                self.events += 1
                if isinstance(done, Read):
                    if done.what is Get.HIT:
                        self.counts.read_seconds.setdefault(queue.name, []).append(done.seconds)
                    self._came(done.key, done.what)
                else:
                    if done.what is Put.STORED:
                        self.counts.write_seconds.setdefault(queue.name, []).append(done.seconds)
                    writing.wrote(done.key)
        if self._fetches:
            self.events += 1
            for fetch in self._fetches:
                self._advance(fetch)
            self._fetches = [fetch for fetch in self._fetches if not fetch.over]
        for writing in self.writing:
            self.events += writing.pump()

    def clear(self) -> None:
        """Forget what is in host memory, and what is owed of it; slow tiers keep what they have."""
        self.events += 1
        self._host.clear()
        for writing in self.writing:
            writing.forget()

    def shutdown(self, patience_seconds: float) -> None:
        """Write what is owed, as long as that takes no longer than this, and end all threads."""
        for writing in self.writing:
            writing.flush()
        ends = time.monotonic() + patience_seconds
        for queue in self._queues:
            queue.close(max(ends - time.monotonic(), 0))

    def _first_of(self, asked: tuple[bool, ...]) -> Places:
        """By the marks of a tag, the fastest of its places that are asked."""
        if asked not in self._firsts:
            marks = np.arange(1 << MOST_PLACES)
            found = self._firsts[asked] = np.full(len(marks), NOWHERE)
            bits = [self._host.tags.bit, *(queue.tier.tags.bit for queue in self._queues)]
            for place in reversed(range(len(bits))):
                if asked[place]:
                    found[(marks & bits[place]) != 0] = place
        return self._firsts[asked]

    def _coming(self, tags: Uint64s, without: frozenset[str]) -> Places:
        """The places that chunks are being read from, 0 of those that are not; see `places`."""
        reads = [
            NOWHERE if queue.name in without or queue.stuck_for_reading else number
            for number, queue in enumerate(self._queues, 1)
        ]
        coming = tags_of(list(self._incoming))
        places = np.array([reads[one.source] for one in self._incoming.values()], np.int64)
        order = coming.argsort()
        at = order[coming[order].searchsorted(tags).clip(max=len(order) - 1)]
        return np.where(coming[at] == tags, places[at], 0)

    def _body(self, slot: Slot) -> memoryview:
        return self._memory(slot.offset, self._groups[slot.group].chunk_bytes)

    def _file(self, group: int, tokens: int) -> Group:
        """What a chunk of so many tokens is as a file."""
        if (group, tokens) not in self._files:
            self._files[group, tokens] = group_of(self._groups[group], tokens)
        return self._files[group, tokens]

    def _advance(self, fetch: Fetch) -> None:
        """Look for chunks as far as there is room for them."""
        while fetch.left and fetch.failure is None and self._bring(fetch, fetch.left[0]):
            fetch.left.popleft()

    def _bring(self, fetch: Fetch, want: Want) -> bool:
        """Hold a chunk that is here, or have it read; False if there is no room for it yet."""
        if incoming := self._incoming.get(want.key):
            incoming.waiting.append(fetch)
            fetch.coming[want.key] = want
        elif (slot := self._host.hold(want.key)) is not None:
            self._give(fetch, want, slot, HOST)
        elif sources := self._sources(fetch, want.key):
            slot = self._host.reserve(want.key, want.group, counted=False)
            if slot is None:
                return False
            group = self._file(want.group, want.tokens)
            incoming = _Incoming(slot, group, sources[0], sources[1:], [fetch])
            self._incoming[want.key] = incoming
            fetch.coming[want.key] = want
            self._read(incoming)
        else:
            fetch.failure, fetch.miss = "a chunk has gone since it was offered", Get.ABSENT
        return True

    def _sources(self, fetch: Fetch, key: bytes) -> list[int]:
        """Tiers that should have a chunk, the fastest first."""
        return [
            number
            for number, queue in enumerate(self._queues)
            if queue.name not in fetch.without and queue.known([key])[0]
        ]

    def _read(self, incoming: _Incoming) -> None:
        slot = incoming.slot
        self._queues[incoming.source].read(slot.key, incoming.group, self._body(slot))

    def _came(self, key: bytes, what: Get) -> None:
        """A tier has given a chunk, or has not."""
        incoming = self._incoming[key]
        name = self._queues[incoming.source].name
        if what is Get.HIT:
            del self._incoming[key]
            self._keep(incoming, name)
            return
        self.counts.missed[name, what] += 1
        for fetch in incoming.waiting:
            if key in fetch.coming and what is Get.IO_ERROR:
                fetch.failed.add(name)
        if incoming.others:
            incoming.source = incoming.others.pop(0)
            self._read(incoming)
            return
        del self._incoming[key]
        self._host.abort(incoming.slot)
        self._fail(incoming, f"a chunk of the {name} tier: {what}", what)

    def _keep(self, incoming: _Incoming, name: str) -> None:
        key = incoming.slot.key
        if not self._host.commit(incoming.slot):
            self._fail(incoming, "the cache was reset")
            return
        for writing in self.writing[: incoming.source]:
            writing.owe(key, incoming.group)
        for fetch in incoming.waiting:
            want, slot = fetch.coming.pop(key, None), None
            if want is not None and (slot := self._host.hold(key)) is not None:
                self._give(fetch, want, slot, name)

    def _give(self, fetch: Fetch, want: Want, slot: Slot, name: str) -> None:
        fetch.ready.append((want, slot))
        fetch.tiers.add(name)
        self.counts.fetched[name] += 1

    def _fail(self, incoming: _Incoming, why: str, what: Get | None = None) -> None:
        for fetch in incoming.waiting:
            if fetch.coming.pop(incoming.slot.key, None) is not None and fetch.failure is None:
                fetch.failure, fetch.miss = why, what
