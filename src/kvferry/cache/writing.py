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

WRITE_BACK_SHARE = 0.5
"""Share of host memory in use, from 0 to 1, above which write-back starts to write."""


@dataclass(frozen=True, slots=True)
class SlowTier:
    """A storage tier that is slower than host memory, and its write mode.

    Attributes:
        queue: queue of the tier's reads and writes, with its threads.
        write_back: True to write chunks only when host memory fills up or at shutdown (write-back); False to
            write each chunk soon after it is stored in host memory (write-through).
    """

    queue: TierQueue
    write_back: bool = False


@dataclass(slots=True)
class Writing:
    """Writes chunks from host memory to one slow tier, and keeps the queue of chunks still to be written.

    Only the engine's thread may use it.

    Attributes:
        slow_tier: slow tier to write to.
        host: host tier that holds the chunks.
        slot_memory: function that returns the memory of a slot (space of one chunk in host memory).
        lost: number of queued chunks that host memory evicted before their write started.
        queued: chunks still to be written, the oldest first: (description, cold) by key.
        held: slots of the chunks that are being written, by key.
    """

    slow_tier: SlowTier
    host: HostTier
    slot_memory: Callable[[Slot], memoryview]
    lost: int = 0
    queued: OrderedDict[bytes, tuple[ChunkGroup, bool]] = field(default_factory=OrderedDict)
    held: dict[bytes, Slot] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of chunks that are queued or being written."""
        return len(self.queued) + len(self.held)

    def enqueue(self, key: bytes, group: ChunkGroup, *, cold: bool = False) -> None:
        """Queue a chunk for writing to the slow tier, unless the tier has the chunk or is writing it.

        Args:
            key: key of the chunk, which must be in host memory.
            group: description of the content: KV cache group, number of tokens and layout.
            cold: True if the tier evicts the chunk before all chunks that are not cold, until it is used.
        """
        if key not in self.held and not self.slow_tier.queue.tier.contains([key])[0]:
            self.queued[key] = group, cold

    @property
    def due(self) -> bool:
        """True if chunks are queued and should be written as soon as the tier accepts a write.

        It is False in write-back mode while host memory has room, and while the tier's writes hang.
        """
        return bool(self.queued) and self._may_write and not self.slow_tier.queue.stuck_for_writing

    @property
    def under_way(self) -> bool:
        """True if chunks are being written. It is False while the tier's writes hang."""
        return bool(self.held) and not self.slow_tier.queue.stuck_for_writing

    def pump(self) -> int:
        """Start as many writes as the tier and the write mode allow; return how many chunks left the queue.

        A queued chunk that host memory has evicted leaves the queue too, and counts as lost.
        """
        if not (before := len(self.queued)):
            return 0
        while self.queued and self._may_write and self.slow_tier.queue.can_write:
            self._write_next()
        return before - len(self.queued)

    def on_write_ended(self, key: bytes) -> None:
        """Release the slot (memory of one chunk) of a chunk whose write has ended, whatever the outcome."""
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
        """True if the write mode permits a write now.

        Write-through always permits it. Write-back permits it when host memory is fuller than
        `WRITE_BACK_SHARE`.
        """
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
