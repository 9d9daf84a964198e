"""The slab allocator of an arena, which divides it into slots for chunks.

The arena is cut into *slabs* of equal size. A slab is cut into slots of one size, the *stride*. All chunks of
a group have one size, and a model has few groups, so there are few strides. A slab whose slots are all free
becomes *spare*, and may be used for another stride. Slot `i` begins at ``slab * slab_bytes + i * stride``.

    spare ─take→ slots of one stride, some free ─last slot freed→ spare

Two alternatives were rejected:

- Pages of one size, with a chunk as a list of pages. A unit of a section (such as a head of all layers) can
  be larger than a page, or straddle two. Then the units of a rank are not at a constant stride, which gather
  and scatter need (`memory.staging_copies.StagedImages`), and storage cannot write a chunk in one call.
- One sparse address range per stride, whose memory is freed by punching holes. Memory that is registered with
  a GPU or a NIC stays registered, so a transfer would use pages that are no longer mapped.

The waste is limited to less than one slot at the end of each slab, and to free slots of strides that are not
in demand. The slab size is chosen so that the first is small. When the free slots of one stride add up to a
slab, `reclaimable` returns slabs that the caller may empty for another stride, by evicting their chunks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from kvferry.errors import ConfigError

_LARGEST_PER_SLAB = 16
"""Maximum size of a slab, as a number of the largest chunks. To empty a slab, all its chunks are evicted."""


class Slabs:
    """An allocator of slots (memory of one chunk each) of a few fixed sizes. Not thread-safe.

    The slots lie in an arena (contiguous memory). The arena is divided into slabs of equal size, and each
    slab in use is divided into slots of one size.

    Attributes:
        slab_bytes: bytes of one slab.
        count: number of slabs.
        capacity_bytes: bytes of all slabs together; the rest of the arena is not used.
        used_bytes: bytes of all allocated slots.
    """

    def __init__(self, capacity_bytes: int, strides: Collection[int]) -> None:
        """Create an allocator with no allocated slot.

        Args:
            capacity_bytes: bytes of the arena (host memory that is divided into slots).
            strides: sizes of slots in bytes; duplicates are allowed.

        Raises:
            ConfigError: the arena is too small for one slab of each slot size.
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
        """Return whether a slot (memory of one chunk) of `stride` bytes can be allocated."""
        return bool(self._open[stride] or self._spare)

    def take(self, stride: int) -> int | None:
        """Allocate a slot (memory of one chunk) of `stride` bytes; return its byte offset in the arena.

        Return None if no slot of this size is free and no slab (part of the arena) is unused.
        """
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

    def free(self, offset: int) -> None:
        """Free the slot at byte `offset` of the arena. No code may read or write the slot afterwards."""
        slab = offset // self.slab_bytes
        stride = self._stride[slab]
        self._free[slab].append(offset)
        self._open[stride][slab] = None
        self._idle[stride] += 1
        self.used_bytes -= stride
        if len(self._free[slab]) == self.slab_bytes // stride:
            self._retire(slab)

    def reclaimable(self, stride: int) -> list[int]:
        """Return the slabs (parts of the arena) that could be emptied to get slots of `stride` bytes.

        The slots of such a slab have another size than `stride`. At least one of them is free. The free slots
        of their size in all slabs add up to at least `slab_bytes`. The time is proportional to the number of
        slabs that have free slots.

        Returns:
            The indices of the slabs, the slab with the most free bytes first.
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
        """Return the byte offsets of all slots of a slab (part of the arena), allocated or free.

        Args:
            slab: index of the slab.

        Returns:
            The offsets in the arena; empty if the slab is not divided into slots.
        """
        stride = self._stride.get(slab)
        first = slab * self.slab_bytes
        return range(first, first + self.slab_bytes // stride * stride, stride) if stride else range(0)

    def check_integrity(self) -> None:
        """Check that all counts and lists of slabs and slots are consistent.

        Raises:
            AssertionError: a count or a list is inconsistent; the message describes it.
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
        """Divide an unused slab (part of the arena) into free slots.

        Args:
            slab: index of the slab.
            stride: bytes of a slot.
        """
        self._stride[slab] = stride
        free = list(self.slots(slab))
        free.reverse()
        self._free[slab] = free
        self._open[stride][slab] = None
        self._idle[stride] += len(free)

    def _retire(self, slab: int) -> None:
        """Return an empty slab (part of the arena) to the unused slabs.

        When an unused slab is taken again, it can be divided into slots of another size.

        Args:
            slab: index of the slab, whose slots must all be free.
        """
        stride = self._stride.pop(slab)
        self._idle[stride] -= len(self._free.pop(slab))
        del self._open[stride][slab]
        self._spare.append(slab)


def _slab_bytes(capacity_bytes: int, strides: Collection[int]) -> int:
    """Choose the size of the slabs (equal parts of the arena) so that the fewest bytes are wasted.

    The result is a multiple of the largest slot size. Bytes of the arena outside all slots are wasted. They
    are counted for the worst case, in which all slabs are divided into slots of the size that wastes most.

    Args:
        capacity_bytes: bytes of the arena.
        strides: sizes of slots in bytes.

    Returns:
        The size of a slab in bytes.
    """
    largest = max(strides)
    most = capacity_bytes // (largest * 4 * len(strides))
    sizes = [n * largest for n in range(1, max(min(most, _LARGEST_PER_SLAB), 1) + 1)]

    def lost(size: int) -> int:
        """Return the bytes outside all slots for slabs of `size` bytes and the slot size that wastes most."""
        return max(capacity_bytes - capacity_bytes // size * (size // stride) * stride for stride in strides)

    return min(sizes, key=lambda size: (lost(size), size))
