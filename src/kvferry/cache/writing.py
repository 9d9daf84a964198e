"""Writes of chunks from host memory to slow tiers.

Each slow tier has a queue of chunks still to be written. With *write-through*, a queued chunk is written as
soon as the tier accepts another write. With *write-back*, it is written when host memory is fuller than
`WRITE_BACK_SHARE`, or at shutdown. If a tier is too slow, host memory evicts queued chunks before they are
written. These losses are counted, and delay no other work.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.cache.tier_queue import TierQueue
from kvferry.tiers.format.chunk import ChunkGroup
from kvferry.tiers.host.tier import HostTier, Slot

# Share of host memory in use above which write-back starts to write.
WRITE_BACK_SHARE = 0.5


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
    def due(self) -> bool:
        """Whether chunks are queued and should be written as soon as the tier accepts a write.

        It is False in write-back mode while host memory has room, and while the tier's writes hang.
        """
        return bool(self.queued) and self._may_write and not self.slow_tier.queue.writes.stuck

    @property
    def under_way(self) -> bool:
        """Whether chunks are being written. It is False while the tier's writes hang."""
        return bool(self.held) and not self.slow_tier.queue.writes.stuck

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
        """Start the writes of all queued chunks now. Ignore the write mode and the tier's limit on writes."""
        while self.queued:
            self._write_next()

    def drop_queued(self) -> None:
        """Drop all queued chunks. Writes in flight continue."""
        self.queued.clear()

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
