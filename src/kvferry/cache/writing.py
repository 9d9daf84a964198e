"""Writes from host memory to slow tiers. A chunk is *owed* to a tier until its write starts.

*Write-through* writes a chunk as soon as the tier has room for another write. *Write-back* writes it once
host memory is fuller than `WRITE_BACK_SHARE`, and at shutdown. A tier that is too slow loses chunks: they
leave host memory before their turn. Losses are counted and delay no other work.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.cache.tier_queue import TierQueue
from kvferry.tiers.format.chunk import ChunkGroup
from kvferry.tiers.host.tier import HostTier, Slot

WRITE_BACK_SHARE = 0.5
"""The share of host memory that chunks may fill before write-back starts to write."""


@dataclass(frozen=True, slots=True)
class SlowTier:
    """A slow tier behind host memory, and when chunks are written to it.

    Attributes:
        queue: the tier and its threads.
        write_back: whether to write only when host memory fills up, or at shutdown.
    """

    queue: TierQueue
    write_back: bool = False


@dataclass(slots=True)
class Writing:
    """The chunks owed to one tier, and those being written. Only the engine's thread may use it.

    Attributes:
        slow_tier: the slow tier.
        host: the host tier that has the chunks.
        body: function from a slot to its writable memory.
        lost: number of chunks that were evicted from host memory before they were written.
    """

    slow_tier: SlowTier
    host: HostTier
    body: Callable[[Slot], memoryview]
    lost: int = 0
    _owed: OrderedDict[bytes, ChunkGroup] = field(default_factory=OrderedDict)
    _held: dict[bytes, Slot] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of chunks that are owed or being written."""
        return len(self._owed) + len(self._held)

    def owe(self, key: bytes, group: ChunkGroup) -> None:
        """Queue a chunk of host memory for writing, unless the tier has it or is writing it."""
        if key not in self._held and not self.slow_tier.queue.tier.contains([key])[0]:
            self._owed[key] = group

    @property
    def due(self) -> bool:
        """Return whether chunks are to be written once the tier has room; False for a stuck tier."""
        return bool(self._owed) and self._wanted and not self.slow_tier.queue.stuck_for_writing

    @property
    def under_way(self) -> bool:
        """Return whether chunks are being written; False for a stuck tier."""
        return bool(self._held) and not self.slow_tier.queue.stuck_for_writing

    def pump(self) -> int:
        """Start as many writes as the tier has room for; return the number of chunks no longer owed."""
        if not (before := len(self._owed)):
            return 0
        while self._owed and self._wanted and self.slow_tier.queue.can_write:
            self._write_next()
        return before - len(self._owed)

    def on_write_ended(self, key: bytes) -> None:
        """Release the slot of a chunk whose write has ended, whether or not the tier stored it."""
        self.host.close(self._held.pop(key))

    def flush(self) -> None:
        """Start writes of all chunks that are owed, even if the tier has no room."""
        while self._owed:
            self._write_next()

    def forget(self) -> None:
        """Drop all owed chunks; writes that have started continue."""
        self._owed.clear()

    @property
    def _wanted(self) -> bool:
        full = self.host.used_bytes > WRITE_BACK_SHARE * self.host.capacity_bytes
        return full or not self.slow_tier.write_back

    def _write_next(self) -> None:
        key, group = self._owed.popitem(last=False)
        slot = self.host.hold(key)
        if slot is None:
            self.lost += 1
            return
        self._held[key] = slot
        self.slow_tier.queue.write(key, group, self.body(slot))
