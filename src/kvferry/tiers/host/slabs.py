"""Which bytes of an arena are whose: slabs of one size, each cut into slots of one stride.

All chunks of a group have one size, and a model has few groups, so there are few sizes. A slab serves one of
them at a time; empty, it goes back to the *spare* ones and may serve another. Slot `i` of it
begins at ``slab * slab_bytes + i * stride``.

    spare ─take→ slots of one stride, some free ─last slot given back→ spare

Why not uniform pages, a chunk being a list of them: nothing would ever have to be moved between sizes. But a
unit of a section (a head of all layers) is larger than a good page or straddles two, so a rank's part would
be neither one piece nor pieces at one distance, which gather and scatter take
(`memory.cell_copies.StagedCells`) and what storage writes in one call. Why not one sparse range of addresses
per size, with memory given back by punching holes: memory that is registered with a GPU or a NIC stays
registered where it was, and a transfer would read and write pages that nobody maps any more.

What slabs cost is bounded: at the end of a slab less than one slot (the slab's size is chosen so that it is
little), and free slots of a size that nobody asks for now. When those come to a slab, one slab can be emptied
for who asks (`crowding`); which chunks are lost by that is the caller's to accept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from kvferry.errors import ConfigError

_LARGEST_PER_SLAB = 16
"""A slab has at most so many of the largest chunks: emptying one loses them."""


class Slabs:
    """Slots taken and free. Not thread-safe; knows nothing of what is in a slot.

    Attributes:
        slab_bytes: of every slab.
        count: slabs.
        capacity_bytes: of all of them; what is beyond in the arena is not used.
        used_bytes: of all slots that are taken.
    """

    def __init__(self, capacity_bytes: int, strides: Collection[int]) -> None:
        """All spare.

        Args:
            capacity_bytes: of the arena.
            strides: bytes of a slot, of every size that will be asked for.

        Raises:
            ConfigError: some size would be without a slab.
        """
        kinds = sorted(set(strides))
        self.slab_bytes = _slab_bytes(capacity_bytes, kinds)
        self.count = capacity_bytes // self.slab_bytes
        if self.count < len(kinds):
            raise ConfigError(
                f"host tier: a capacity of {capacity_bytes} bytes, but chunks of {len(kinds)} sizes up to "
                f"{kinds[-1]} bytes need {len(kinds) * self.slab_bytes} or more; raise its capacity or lower "
                "the tokens of a chunk"
            )
        self.capacity_bytes = self.count * self.slab_bytes
        self.used_bytes = 0
        self._spare = list(range(self.count - 1, -1, -1))
        self._stride: dict[int, int] = {}
        self._free: dict[int, list[int]] = {}
        self._open: dict[int, dict[int, None]] = {stride: {} for stride in kinds}
        self._idle: Counter[int] = Counter()

    def has_room(self, stride: int) -> bool:
        """Whether `take` would find a slot."""
        return bool(self._open[stride] or self._spare)

    def take(self, stride: int) -> int | None:
        """Take a slot; returns its offset in bytes, None if none is free."""
        if not self._open[stride]:
            if not self._spare:
                return None
            self._assign(self._spare.pop(), stride)
        slab = next(reversed(self._open[stride]))
        offset = self._free[slab].pop()
        if not self._free[slab]:
            del self._open[stride][slab]
        self._idle[stride] -= 1
        self.used_bytes += stride
        return offset

    def give(self, offset: int) -> None:
        """Give a slot back that was taken; nothing reads or writes it any more."""
        slab = offset // self.slab_bytes
        stride = self._stride[slab]
        self._free[slab].append(offset)
        self._open[stride][slab] = None
        self._idle[stride] += 1
        self.used_bytes -= stride
        if len(self._free[slab]) == self.slab_bytes // stride:
            self._retire(slab)

    def crowding(self, stride: int) -> list[int]:
        """Slabs that another size could spare for this one, emptiest first.

        Of every other size whose free slots come to a slab's bytes or more, those slabs that have free slots.
        Takes time with their number.
        """
        return sorted(
            (
                slab
                for other, slabs in self._open.items()
                if other != stride and self._idle[other] * other >= self.slab_bytes
                for slab in slabs
            ),
            key=lambda slab: -len(self._free[slab]) * self._stride[slab],
        )

    def slots(self, slab: int) -> range:
        """Offsets of all slots of a slab, free ones too; empty if it is spare."""
        stride = self._stride.get(slab)
        first = slab * self.slab_bytes
        return range(first, first + self.slab_bytes // stride * stride, stride) if stride else range(0)

    def check_integrity(self) -> None:
        """Compare the books with themselves.

        Raises:
            AssertionError: they contradict each other; the message says where.
        """
        if sorted([*self._spare, *self._stride]) != list(range(self.count)):
            raise AssertionError("a slab is neither spare nor assigned, or both")
        idle: Counter[int] = Counter()
        taken = 0
        for slab, stride in self._stride.items():
            free, slots = self._free[slab], self.slots(slab)
            if len(set(free)) != len(free) or not set(free) < set(slots):
                raise AssertionError(f"slab {slab} has free slots {free} of {slots}")
            if bool(free) != (slab in self._open[stride]):
                raise AssertionError(f"slab {slab} has {len(free)} free slots but is not kept so")
            idle[stride] += len(free)
            taken += (len(slots) - len(free)) * stride
        if +self._idle != +idle or taken != self.used_bytes:
            raise AssertionError(
                f"{+idle} slots free, {taken} bytes taken; kept {self._idle}, {self.used_bytes}"
            )

    def _assign(self, slab: int, stride: int) -> None:
        self._stride[slab] = stride
        free = list(self.slots(slab))
        free.reverse()
        self._free[slab] = free
        self._open[stride][slab] = None
        self._idle[stride] += len(free)

    def _retire(self, slab: int) -> None:
        stride = self._stride.pop(slab)
        self._idle[stride] -= len(self._free.pop(slab))
        del self._open[stride][slab]
        self._spare.append(slab)


def _slab_bytes(capacity_bytes: int, strides: Collection[int]) -> int:
    """So many of the largest chunk that the size which fits worst loses least; few rather than many."""
    largest = max(strides)
    most = capacity_bytes // (largest * 4 * len(strides))
    sizes = [n * largest for n in range(1, max(min(most, _LARGEST_PER_SLAB), 1) + 1)]

    def lost(size: int) -> int:
        return max(capacity_bytes - capacity_bytes // size * (size // stride) * stride for stride in strides)

    return min(sizes, key=lambda size: (lost(size), size))
