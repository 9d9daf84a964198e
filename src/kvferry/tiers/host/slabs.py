"""An allocator of the arena: slots of a few sizes, in slabs of one size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from kvferry.common.errors import ConfigError

# Maximum size of a slab, as a number of the largest chunks. To empty a slab, all its chunks are evicted.
_LARGEST_PER_SLAB = 16


class Slabs:
    """An allocator of slots of a few fixed sizes, the `strides` in bytes. Not thread-safe.

    The arena is cut into *slabs* of equal size, and a slab into slots of one stride. A slab whose slots are
    all free becomes *spare*, and may be used for another stride. Bytes after the last slab are not used.

    `ready_bytes` returns how many bytes from the beginning of the arena may be used; None for all of them.
    """

    def __init__(
        self, capacity_bytes: int, strides: Collection[int], ready_bytes: Callable[[], int] | None = None
    ) -> None:
        # Not pages, with a chunk as a list of pages: the units of a rank would not be at a constant stride,
        # as copies need, and storage could not write a chunk in one call. Not a sparse range per stride,
        # freed by punching holes: memory that a GPU or a NIC registered would no longer be mapped.
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
        self._ready_bytes = ready_bytes or (lambda: capacity_bytes)
        # The next is the last. Those that were never used are before all others, the first of them last.
        self._spare = list(range(self.count - 1, -1, -1))
        self._stride: dict[int, int] = {}  # of each slab in use
        self._free: dict[int, list[int]] = {}  # offsets of each slab in use
        # Slabs with free slots by stride, in order: the last opened is filled first, so that others get
        # empty.
        self._open: dict[int, dict[int, None]] = {stride: {} for stride in kinds}
        self._idle: Counter[int] = Counter()  # free slots by stride

    def take(self, stride: int) -> int | None:
        """Allocate a slot of `stride` bytes; return its offset in the arena, or None if there is no room."""
        if not self._open[stride]:
            if not self._spare or (self._spare[-1] + 1) * self.slab_bytes > self._ready_bytes():
                return None
            slab = self._spare.pop()
            self._stride[slab] = stride
            self._free[slab] = list(self.slots(slab))[::-1]
            self._open[stride][slab] = None
            self._idle[stride] += len(self._free[slab])
        slab = next(reversed(self._open[stride]))
        offset = self._free[slab].pop()
        if not self._free[slab]:
            del self._open[stride][slab]
        self._idle[stride] -= 1
        self.used_bytes += stride
        return offset

    def free(self, offset: int) -> None:
        """Free the slot at an offset of the arena. No code may read or write the slot afterwards."""
        slab = offset // self.slab_bytes
        stride = self._stride[slab]
        self._free[slab].append(offset)
        self._open[stride][slab] = None
        self._idle[stride] += 1
        self.used_bytes -= stride
        if len(self._free[slab]) == self.slab_bytes // stride:
            del self._stride[slab], self._open[stride][slab]
            self._idle[stride] -= len(self._free.pop(slab))
            self._spare.append(slab)

    def reclaimable(self, stride: int) -> list[int]:
        """Return the slabs that could be emptied for slots of `stride` bytes, the emptiest first.

        The free slots of their own stride add up to a slab or more.
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
        """Return the offsets of all slots of a slab, allocated or free; empty for a spare slab."""
        stride = self._stride.get(slab)
        first = slab * self.slab_bytes
        return range(first, first + self.slab_bytes // stride * stride, stride) if stride else range(0)

    def check_integrity(self) -> None:
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


def _slab_bytes(capacity_bytes: int, strides: Collection[int]) -> int:
    """Choose the slab size, a multiple of the largest stride, that wastes the fewest bytes."""
    largest = max(strides)
    # At least four slabs per stride, so that one stride cannot keep the arena from the others.
    most = capacity_bytes // (largest * 4 * len(strides))
    sizes = [n * largest for n in range(1, max(min(most, _LARGEST_PER_SLAB), 1) + 1)]

    # In the worst case, in which all slabs have the stride that wastes most.
    def lost(size: int) -> int:
        return max(capacity_bytes - capacity_bytes // size * (size // stride) * stride for stride in strides)

    return min(sizes, key=lambda size: (lost(size), size))
