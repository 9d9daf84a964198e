"""The tiered cache of one engine, for the thread that schedules: chunks by key, in host memory and behind it.

Host memory is where every chunk passes: ranks copy between it and their blocks, threads copy between it and
storage.

    store   reserve ─▶ (ranks copy) ─▶ filled ─▶ in host memory, and owed to every slow tier (`writing`)
    load    fetch ─▶ in host memory, whatever tier had it, and held (`reading`) ─▶ (ranks copy) ─▶ close

Nothing here blocks, and nothing raises for what a tier does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvferry.cache.counts import CacheCounts, TransferTimes
from kvferry.cache.reading import Reading
from kvferry.cache.tier_queue import Read
from kvferry.cache.writing import Behind, Writing
from kvferry.geometry.canonical import CanonicalGroup
from kvferry.planning.coverage import NO_TIER
from kvferry.tiers.format.body import chunk_group
from kvferry.tiers.format.chunk import ChunkGroup
from kvferry.tiers.host.counters import HostMissReason
from kvferry.tiers.host.tier import HostTier, Slot
from kvferry.tiers.index.key_table import tags_of
from kvferry.tiers.outcome import GetOutcome, PutOutcome


class ChunkCache:
    """The chunks of one engine in host memory and storage. Not thread-safe.

    Attributes:
        counts: what it has done.
        writing: what every slow tier is owed, the fastest first.
        reading: what they are to give, and the loads that wait for it.
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
        if any(one.queue.tier.keys.table is not host.keys.table for one in behind):
            raise ValueError("tiers of one cache share a table of tags")
        self.counts, self._events = CacheCounts(), 0
        self._times = TransferTimes()
        self._host = host
        self._memory, self._groups = body, tuple(groups)
        self._files: dict[tuple[int, int], ChunkGroup] = {}
        self.writing = tuple(Writing(one, host, self._body) for one in behind)
        self._queues = [one.queue for one in behind]
        self.reading = Reading(host, self.writing, self._body, self._file, self.counts)

    @property
    def events(self) -> int:
        """How often something was done; no count has changed while this has not."""
        return self._events + self.reading.events

    @property
    def busy(self) -> bool:
        """Coming steps have something to do: a load waits for chunks, or some are to be written or just are.

        A chunk that is read and nobody waits for is heard of in whichever step comes next.
        """
        return bool(self.reading.fetches) or any(writing.due or writing.under_way for writing in self.writing)

    @property
    def host(self) -> HostTier:
        """To look at, not to change."""
        return self._host

    def why_missed(self, key: bytes) -> HostMissReason:
        """Why a chunk is not at hand, as far as that is remembered; "absent" of one that was never here."""
        why = self._host.miss_reason(key)
        if why is HostMissReason.ABSENT and any(
            queue.tier.keys.recently_evicted(key) for queue in self._queues
        ):
            return HostMissReason.EVICTED
        return why

    @property
    def stranger(self) -> str:
        """A namespace of a model of the same name, in a place where there is nothing of this one's."""
        return next(
            (queue.around.same_name_namespace for queue in self._queues if queue.around.same_name_namespace),
            "",
        )

    def at_hand(self, keys: Sequence[bytes], without: Iterable[str] = ()) -> npt.NDArray[np.bool_]:
        """Which chunks could be loaded now: bool of shape (len(keys),).

        Args:
            keys: of chunks.
            without: names of tiers that are not asked.
        """
        return self.reading.places(tags_of(keys), without) < NO_TIER

    @property
    def tiers(self) -> list[str]:
        """Names of the slow tiers, the fastest first."""
        return [queue.name for queue in self._queues]

    def reserve(self, key: bytes, group: int) -> Slot | None:
        """Room for a chunk that ranks will fill; None if there is none, which is counted."""
        self._events += 1
        return self._host.reserve(key, group)

    def filled(self, slot: Slot, tokens: int, failure: str | None) -> None:
        """Ranks have filled a slot, or could not, and touch it no more.

        Args:
            slot: of `reserve`.
            tokens: that the chunk holds; 0 of a snapshot.
            failure: why they could not, None if they have.
        """
        self._events += 1
        if failure is not None:
            self.counts.failed += 1
            self._host.abort(slot)
        elif self._host.commit(slot):
            self.counts.stored += 1
            for writing in self.writing:
                writing.owe(slot.key, self._file(slot.group, tokens))

    def close(self, slot: Slot) -> None:
        """A load is done with a chunk that it had."""
        self._host.close(slot)

    def used(self, keys: Sequence[bytes]) -> None:
        """A prompt was used, with all of its chunks, wherever they were taken from: its end shall go first.

        Args:
            keys: of its chunks, from its beginning on, kept or not.
        """
        self._host.mark_used(keys)
        for queue in self._queues:
            queue.used(keys)

    def poll(self) -> None:
        """Hear what threads have done, and give them more to do; once per step."""
        for queue, writing in zip(self._queues, self.writing, strict=True):
            for done in queue.done():
                self._events += 1
                if isinstance(done, Read):
                    if done.what is GetOutcome.HIT:
                        self._times.reads.setdefault(queue.name, []).append(done.seconds)
                    self.reading.came(done.key, done.what)
                else:
                    if done.what is PutOutcome.STORED:
                        self._times.writes.setdefault(queue.name, []).append(done.seconds)
                    writing.wrote(done.key)
        self.reading.advance()
        for writing in self.writing:
            self._events += writing.pump()

    def take_times(self) -> TransferTimes:
        """Return the times of chunks since the last call; called once per step, so that few are kept."""
        times, self._times = self._times, TransferTimes()
        return times

    def clear(self) -> None:
        """Forget what is in host memory, and what is owed of it; slow tiers keep what they have."""
        self._events += 1
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

    def _body(self, slot: Slot) -> memoryview:
        return self._memory(slot.offset, self._groups[slot.group].chunk_bytes)

    def _file(self, group: int, tokens: int) -> ChunkGroup:
        """What a chunk of so many tokens is as a file."""
        if (group, tokens) not in self._files:
            self._files[group, tokens] = chunk_group(self._groups[group], tokens)
        return self._files[group, tokens]
