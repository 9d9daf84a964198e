"""What slow tiers have still to get: chunks are in host memory, *owed* to a tier, until it has taken them.

*Write-through* gives a chunk to a tier as soon as the tier takes it; *write-back* once host memory is fuller
than `WRITE_BACK_SHARE`, and at the end. A tier that is slower than what is stored loses chunks by itself:
they leave host memory before their turn comes. That is counted, and holds nobody up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.cache.tier_queue import TierQueue
from kvferry.tiers.format.chunk import ChunkGroup
from kvferry.tiers.host.tier import HostTier, Slot

WRITE_BACK_SHARE = 0.5
"""Of host memory: how much of it chunks may fill before write-back writes."""


@dataclass(frozen=True, slots=True)
class Behind:
    """A slow tier behind host memory.

    Attributes:
        queue: its threads.
        write_back: write only when host memory fills up, or at the end.
    """

    queue: TierQueue
    write_back: bool = False


@dataclass(slots=True)
class Writing:
    """What one tier is owed, and what is being written. Not thread-safe: the engine's thread.

    Attributes:
        behind: the tier.
        host: where the chunks are.
        body: memory of a slot, writable.
        lost: chunks that left host memory before their turn.
    """

    behind: Behind
    host: HostTier
    body: Callable[[Slot], memoryview]
    lost: int = 0
    _owed: OrderedDict[bytes, ChunkGroup] = field(default_factory=OrderedDict)
    _held: dict[bytes, Slot] = field(default_factory=dict)

    def __len__(self) -> int:
        """Chunks that it is owed or is taking."""
        return len(self._owed) + len(self._held)

    def owe(self, key: bytes, group: ChunkGroup) -> None:
        """A chunk has come to host memory; it is the tier's as well, unless it has it."""
        if key not in self._held and not self.behind.queue.tier.contains([key])[0]:
            self._owed[key] = group

    @property
    def due(self) -> bool:
        """There is something to write, now or when the tier has room again; not of a tier that is stuck."""
        return bool(self._owed) and self._wanted and not self.behind.queue.stuck_for_writing

    @property
    def under_way(self) -> bool:
        """Chunks are being written, and it will be heard of them; not of a tier that is stuck."""
        return bool(self._held) and not self.behind.queue.stuck_for_writing

    def pump(self) -> int:
        """Give the tier as much as it takes; how many chunks are owed no more."""
        if not (before := len(self._owed)):
            return 0
        while self._owed and self._wanted and self.behind.queue.can_write:
            self._write_next()
        return before - len(self._owed)

    def wrote(self, key: bytes) -> None:
        """The tier has taken a chunk, or has not: its memory is no longer needed for that."""
        self.host.close(self._held.pop(key))

    def flush(self) -> None:
        """Give the tier everything, whatever it takes."""
        while self._owed:
            self._write_next()

    def forget(self) -> None:
        """Nothing that is owed is wanted any more."""
        self._owed.clear()

    @property
    def _wanted(self) -> bool:
        full = self.host.used_bytes > WRITE_BACK_SHARE * self.host.capacity_bytes
        return full or not self.behind.write_back

    def _write_next(self) -> None:
        key, group = self._owed.popitem(last=False)
        slot = self.host.hold(key)
        if slot is None:
            self.lost += 1
            return
        self._held[key] = slot
        self.behind.queue.write(key, group, self.body(slot))
