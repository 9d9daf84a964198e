"""The tiered cache of one engine: chunks of KV by key, in host memory and in slower tiers.

Every chunk passes through host memory. The engine's ranks copy chunks between host memory and their KV
blocks. Background threads copy them between host memory and storage.

    store   reserve ─▶ (ranks copy) ─▶ filled ─▶ in host memory, and queued for every slow tier (`writing`)
    load    fetch ─▶ in host memory, from any tier, and held (`reading`) ─▶ (ranks copy) ─▶ close

A *held* chunk is not evicted. Only `shutdown` blocks. A tier that fails raises no exception: its chunks count
as missed, or are not stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.cache.reading import CacheCounts, Reading, SlowTier, TransferTimes, Writing
from kvferry.cache.tier_queue import ReadEnded
from kvferry.geometry.canonical import CanonicalGroup
from kvferry.planning.coverage import NO_TIER
from kvferry.tiers.format.chunk import ChunkGroup
from kvferry.tiers.format.decode import chunk_group
from kvferry.tiers.host.settings import HostMissReason
from kvferry.tiers.host.tier import HostTier, Slot
from kvferry.tiers.index.key_table import tags_of
from kvferry.tiers.names import GetOutcome, PutOutcome


class ChunkCache:
    """The chunks of one engine in host memory and storage. Only the engine's scheduling thread may use it.

    Chunks that the slow tiers contain already can be loaded from the start.

    Args:
        host: empty host tier. From now on, only the cache may change it.
        memory_at: map an offset and a size, in bytes, to writable memory of the arena.
        groups: KV cache groups with the formats of their chunks. A chunk's group is an index into this
            sequence.
        slow_tiers: slow tiers, the fastest first. From now on, only the cache may use them.
        clock: monotonic seconds.

    Attributes:
        host: host tier, which callers must not change.
        writing: writes of each slow tier, the fastest tier first.
        reading: reads from the slow tiers, and the loads that wait for them.

    Raises:
        ValueError: the tiers do not share one key table.
    """

    def __init__(
        self,
        host: HostTier,
        memory_at: Callable[[int, int], memoryview],
        groups: Sequence[CanonicalGroup],
        slow_tiers: Sequence[SlowTier] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if any(one.queue.tier.keys.table is not host.keys.table for one in slow_tiers):
            raise ValueError("the tiers of one cache must share one key table; open them together")
        self.counts, self._events, self._times = CacheCounts(), 0, TransferTimes()
        self.host, self._clock = host, clock
        self._memory_at, self._groups = memory_at, tuple(groups)
        self._descriptions: dict[tuple[int, int], ChunkGroup] = {}
        self.writing = tuple(Writing(one, host, self._slot_memory) for one in slow_tiers)
        self._queues = [one.queue for one in slow_tiers]
        self.reading = Reading(host, self.writing, self._slot_memory, self._describe_chunk, self.counts)

    @property
    def events(self) -> int:
        """Counter that increases whenever the values in `counts` may have changed."""
        return self._events + self.reading.events

    @property
    def busy(self) -> bool:
        """Whether a load waits for chunks, or a write to a tier that does not hang is in flight or due."""
        return bool(self.reading.fetches) or any(writing.busy for writing in self.writing)

    def miss_reason(self, key: bytes) -> HostMissReason:
        """Return why a chunk could not be found in any tier."""
        why = self.host.miss_reason(key)
        if why is HostMissReason.ABSENT:
            for queue in self._queues:
                if queue.tier.keys.recently_evicted(key):
                    return HostMissReason.EVICTED
        return why

    @property
    def same_name_namespace(self) -> str:
        """Digest (hex) of another namespace with the same model name; empty if there is none.

        It is set only if a slow tier has that namespace, but no chunks of this engine's own. An engine with
        other settings has probably stored chunks there.
        """
        return next((one for queue in self._queues if (one := queue.usage.same_name_namespace)), "")

    def available(self, keys: Sequence[bytes], without: Iterable[str] = ()) -> npt.NDArray[np.bool_]:
        """Return a mask of the chunks that can be loaded now, not from the tiers named in `without`."""
        return self.reading.tier_numbers(tags_of(keys), without) < NO_TIER

    @property
    def tiers(self) -> list[str]:
        return [queue.name for queue in self._queues]

    def reserve(self, key: bytes, group: int) -> Slot | None:
        """Reserve a slot in host memory for a chunk that ranks will fill; None if it is dropped.

        The host tier counts a chunk as dropped that it has, that is being filled, or that has no room.
        """
        self._events += 1
        return self.host.reserve(key, group)

    def filled(self, slot: Slot, tokens: int, failure: str | None, *, cold: bool = False) -> None:
        """Make a chunk available for loads, and queue it for every slow tier, once no rank uses its slot.

        Args:
            tokens: number of tokens in the chunk; 0 for a snapshot.
            failure: reason why the ranks failed, so that the slot is freed; None if they filled it.
        """
        self._events += 1
        if failure is not None:
            self.counts.failed += 1
            self.host.abort(slot)
        elif self.host.commit(slot, cold=cold):
            self.counts.stored += 1
            for writing in self.writing:
                writing.enqueue(slot.key, self._describe_chunk(slot.group, tokens), cold=cold)

    def close(self, slot: Slot) -> None:
        """Release a slot after a load."""
        self.host.close(slot)

    def mark_used(self, keys: Sequence[bytes], cold: Sequence[bytes] = ()) -> None:
        """Mark chunks as used, in the order of their prompt, and `cold` ones to be evicted first.

        Keys of chunks that no tier has are allowed.
        """
        self.host.mark_used(keys, cold)
        for queue in self._queues:
            queue.mark_used(keys)

    def poll(self) -> None:
        """Collect the results of reads and writes, and start more. Call this once per step."""
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
        # After all results: freed slots make room for more chunks of waiting loads.
        self.reading.advance()
        for writing in self.writing:
            self._events += writing.pump()

    def take_times(self) -> TransferTimes:
        """Return the durations of chunk transfers since the last call."""
        times, self._times = self._times, TransferTimes()
        return times

    def clear(self) -> None:
        """Drop all chunks in host memory and all queued writes. Writes in flight continue."""
        self._events += 1
        self.host.clear()
        for writing in self.writing:
            writing.queued.clear()

    def shutdown(self, patience_seconds: float) -> None:
        """Write all queued chunks to the slow tiers, and end their threads.

        What has not ended after about `patience_seconds` is abandoned, and a warning is logged.
        """
        for writing in self.writing:
            writing.flush()
        ends = self._clock() + patience_seconds
        for queue in self._queues:
            queue.close(max(ends - self._clock(), 0))

    def _slot_memory(self, slot: Slot) -> memoryview:
        return self._memory_at(slot.offset, self._groups[slot.group].chunk_bytes)

    def _describe_chunk(self, group: int, tokens: int) -> ChunkGroup:
        # A description is made of each kind of chunk once. There are few.
        if (group, tokens) not in self._descriptions:
            self._descriptions[group, tokens] = chunk_group(self._groups[group], tokens)
        return self._descriptions[group, tokens]


MOST_PINNED = 0.5
"""Maximum share of host memory in use that pins may hold, so that other chunks still find room."""


class _Pin(NamedTuple):
    slots: Sequence[Slot]
    salt: str


class PinnedChunks:
    """The chunks in host memory that operators have pinned, by name of the pin.

    Only the engine's thread calls it.

    Args:
        chunk_bytes: bytes of a chunk, for each KV cache group.
    """

    def __init__(self, host: HostTier, chunk_bytes: Sequence[int]) -> None:
        self._host, self._chunk_bytes = host, tuple(chunk_bytes)
        self._pins: dict[str, _Pin] = {}
        self._held = 0  # bytes

    def pin(self, name: str, keys: Sequence[bytes], salt: str = "") -> int:
        """Pin those of these chunks that are in host memory. Return their number.

        An earlier pin of the same name is replaced. Chunks beyond the share `MOST_PINNED` are not pinned.

        Args:
            keys: keys of the chunks, the first chunk of the prompt first.
            salt: cache salt of the prompt; empty without one.
        """
        self.unpin(name)
        most = MOST_PINNED * self._host.capacity_bytes
        slots: list[Slot] = []
        for key in keys:
            slot = self._host.hold(key)
            if slot is None:
                continue
            if self._held + self._chunk_bytes[slot.group] > most:
                self._host.close(slot)
                break
            self._held += self._chunk_bytes[slot.group]
            slots.append(slot)
        if slots:
            self._pins[name] = _Pin(slots, salt)
        return len(slots)

    def unpin(self, name: str) -> int:
        """Remove a pin. Return the number of chunks that it held; 0 if there is no pin of this name."""
        pin = self._pins.pop(name, None)
        if pin is None:
            return 0
        # In reverse order, so that the end of the prompt is evicted before its start.
        for slot in reversed(pin.slots):
            self._host.close(slot)
            self._held -= self._chunk_bytes[slot.group]
        return len(pin.slots)

    def unpin_salt(self, salt: str) -> None:
        """Remove all pins of prompts with a cache salt, because no request can find these chunks any more."""
        for name in [name for name, pin in self._pins.items() if pin.salt == salt]:
            self.unpin(name)

    def clear(self) -> None:
        """Remove all pins, before host memory is cleared."""
        for name in list(self._pins):
            self.unpin(name)
