"""The tiered cache of one engine: chunks of KV by key, in host memory and in slower tiers.

Only the engine's scheduling thread uses it. Every chunk passes through host memory. The engine's ranks copy
chunks between host memory and their KV blocks. Background threads copy them between host memory and storage.

    store   reserve ─▶ (ranks copy) ─▶ filled ─▶ in host memory, and queued for every slow tier (`writing`)
    load    fetch ─▶ in host memory, from any tier, and held (`reading`) ─▶ (ranks copy) ─▶ close

A *held* chunk is not evicted. Only `shutdown` blocks. A tier that fails raises no exception: its chunks count
as missed, or are not stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvferry.cache.counts import CacheCounts, TransferTimes
from kvferry.cache.reading import Reading
from kvferry.cache.tier_queue import ReadEnded
from kvferry.cache.writing import SlowTier, Writing
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

    A chunk is the KV of a fixed number of tokens in one KV cache group.

    Attributes:
        counts: numbers of stored, failed, fetched and missed chunks since the start.
        writing: queued and running writes of each slow tier, the fastest tier first.
        reading: reads from the slow tiers, and the loads that wait for them. `reading.fetch` starts a load.
    """

    def __init__(
        self,
        host: HostTier,
        memory_at: Callable[[int, int], memoryview],
        groups: Sequence[CanonicalGroup],
        slow_tiers: Sequence[SlowTier] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a cache. Chunks that the slow tiers already contain can be loaded from the start.

        Args:
            host: empty host tier. From now on, only the cache may change it.
            memory_at: function that maps an offset and a size, in bytes, to writable host memory of the arena
                (host memory that holds chunks).
            groups: KV cache groups of the model with the byte formats of their chunks. A chunk's group is an
                index into this sequence.
            slow_tiers: slow tiers, the fastest first. From now on, only the cache may use them.
            clock: function that returns monotonic seconds.

        Raises:
            ValueError: the tiers do not share one key table (record of which tier has which chunks).
        """
        if any(one.queue.tier.keys.table is not host.keys.table for one in slow_tiers):
            raise ValueError("the tiers of one cache must share one key table; open them together")
        self.counts, self._events = CacheCounts(), 0
        self._times = TransferTimes()
        self._host, self._clock = host, clock
        self._memory_at, self._groups = memory_at, tuple(groups)
        self._descriptions: dict[tuple[int, int], ChunkGroup] = {}
        self.writing = tuple(Writing(one, host, self._slot_memory) for one in slow_tiers)
        self._queues = [one.queue for one in slow_tiers]
        self.reading = Reading(host, self.writing, self._slot_memory, self._describe_chunk, self.counts)

    @property
    def events(self) -> int:
        """Counter that increases whenever the values in `counts` may have changed.

        While it stays the same, `counts` need not be read again.
        """
        return self._events + self.reading.events

    @property
    def busy(self) -> bool:
        """True if a load waits for chunks, or if a write to a slow tier is in flight or due (`Writing.due`).

        Writes to a tier whose writes hang do not count, and neither do reads for cancelled loads.
        """
        return bool(self.reading.fetches) or any(writing.due or writing.under_way for writing in self.writing)

    @property
    def host(self) -> HostTier:
        """The host tier. Callers may read its state, but must not change it."""
        return self._host

    def miss_reason(self, key: bytes) -> HostMissReason:
        """Return the reason why a chunk could not be found in any tier.

        FILLING means that the chunk is being copied to host memory, and cannot be read yet. EVICTED means
        that host memory or a slow tier evicted the chunk recently. ABSENT means neither.

        Args:
            key: key of the chunk.
        """
        why = self._host.miss_reason(key)
        if why is HostMissReason.ABSENT and any(
            queue.tier.keys.recently_evicted(key) for queue in self._queues
        ):
            return HostMissReason.EVICTED
        return why

    @property
    def same_name_namespace(self) -> str:
        """Digest (hex) of another namespace with the same model name; empty if there is none.

        It is set only if a slow tier holds that namespace but no chunks in this engine's own namespace. An
        engine with other settings has probably stored chunks there.
        """
        return next(
            (queue.usage.same_name_namespace for queue in self._queues if queue.usage.same_name_namespace),
            "",
        )

    def available(self, keys: Sequence[bytes], without: Iterable[str] = ()) -> npt.NDArray[np.bool_]:
        """Return a mask of the chunks that can be loaded now: bool of shape (len(keys),).

        Args:
            keys: keys of the chunks.
            without: names of tiers from which the chunks must not be loaded.
        """
        return self.reading.tier_numbers(tags_of(keys), without) < NO_TIER

    @property
    def tiers(self) -> list[str]:
        """Names of the slow tiers, the fastest first."""
        return [queue.name for queue in self._queues]

    def reserve(self, key: bytes, group: int) -> Slot | None:
        """Reserve a slot (memory of one chunk in host memory) for a chunk that ranks will fill.

        Return None if host memory has the chunk, is already being filled with it, or has no room for it. In
        all three cases the host tier counts the chunk as dropped.

        Args:
            key: key of the chunk.
            group: index of the chunk's KV cache group.
        """
        self._events += 1
        return self._host.reserve(key, group)

    def filled(self, slot: Slot, tokens: int, failure: str | None, *, cold: bool = False) -> None:
        """Make a chunk available for loads after the ranks have filled its slot.

        The chunk is also queued for writing to every slow tier. If the ranks failed, the slot is freed
        instead. Call this method only when no rank uses the slot any more.

        Args:
            slot: slot (memory of one chunk) that `reserve` returned.
            tokens: number of tokens in the chunk; 0 for a snapshot (recurrent state at one position).
            failure: reason why the ranks failed; None if they filled the slot.
            cold: True if tiers evict the chunk before all others, until it is used.
        """
        self._events += 1
        if failure is not None:
            self.counts.failed += 1
            self._host.abort(slot)
        elif self._host.commit(slot, cold=cold):
            self.counts.stored += 1
            for writing in self.writing:
                writing.enqueue(slot.key, self._describe_chunk(slot.group, tokens), cold=cold)

    def hold(self, key: bytes) -> Slot | None:
        """Hold a chunk in host memory, so that it is not evicted until `close`.

        Return None if host memory does not have the chunk.
        """
        return self._host.hold(key)

    def close(self, slot: Slot) -> None:
        """Release a slot (memory of one chunk in host memory) after a load. The chunk can then be evicted."""
        self._host.close(slot)

    def mark_used(self, keys: Sequence[bytes], cold: Sequence[bytes] = ()) -> None:
        """Mark chunks of a prompt as used, so that other chunks are evicted before them.

        Within the prompt, the last chunks are evicted first. Keys of chunks that no tier has are allowed.

        Args:
            keys: keys of the chunks, the first chunk of the prompt first.
            cold: keys of further chunks, which host memory evicts before all others until they are used.
        """
        self._host.mark_used(keys, cold)
        for queue in self._queues:
            queue.mark_used(keys)

    def poll(self) -> None:
        """Collect the results of reads and writes that have ended, and start more reads and writes.

        The engine calls this once per step.
        """
        for queue, writing in zip(self._queues, self.writing, strict=True):
            for done in queue.done():
                self._events += 1
                if isinstance(done, ReadEnded):
                    if done.what is GetOutcome.HIT:
                        self._times.reads.setdefault(queue.name, []).append(done.seconds)
                    self.reading.on_read_ended(done.key, done.what)
                else:
                    if done.what is PutOutcome.STORED:
                        self._times.writes.setdefault(queue.name, []).append(done.seconds)
                    writing.on_write_ended(done.key)
        self.reading.advance()
        for writing in self.writing:
            self._events += writing.pump()

    def take_times(self) -> TransferTimes:
        """Return the durations of chunk transfers since the last call, and clear them.

        The engine calls this once per step.
        """
        times, self._times = self._times, TransferTimes()
        return times

    def clear(self) -> None:
        """Drop all chunks in host memory and all queued writes. Slow tiers keep their chunks."""
        self._events += 1
        self._host.clear()
        for writing in self.writing:
            writing.drop_queued()

    def shutdown(self, patience_seconds: float) -> None:
        """Write all queued chunks to the slow tiers, and end the threads that read and write these tiers.

        Args:
            patience_seconds: approximate longest time to wait. Reads and writes that have not ended by then
                are abandoned, and a warning is logged.
        """
        for writing in self.writing:
            writing.flush()
        ends = self._clock() + patience_seconds
        for queue in self._queues:
            queue.close(max(ends - self._clock(), 0))

    def _slot_memory(self, slot: Slot) -> memoryview:
        """Return the writable memory of a slot (space of one chunk in host memory)."""
        return self._memory_at(slot.offset, self._groups[slot.group].chunk_bytes)

    def _describe_chunk(self, group: int, tokens: int) -> ChunkGroup:
        """Return the description that a slow tier stores with a chunk: group, number of tokens and layout.

        Args:
            group: index of the KV cache group.
            tokens: number of tokens in the chunk; 0 for a snapshot (recurrent state at one position).
        """
        if (group, tokens) not in self._descriptions:
            self._descriptions[group, tokens] = chunk_group(self._groups[group], tokens)
        return self._descriptions[group, tokens]
