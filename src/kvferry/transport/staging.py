"""Staging memory, which holds images during a transfer.

A worker has two areas that are registered with the transport. It gathers cells for other workers into the
*outgoing* area. It reads images into the *landing* area before it scatters them into blocks. A third area is
host memory that workers of the same machine map (`shared_area`). Areas are allocated in units of
`UNIT_BYTES`. An `Allocation` holds the images of one segment.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from kvferry.geometry import Region
from kvferry.memory.address_space import AddressSpace
from kvferry.memory.staging_copies import StagedImages

UNIT_BYTES = 1 << 20
_ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class Allocation:
    """A contiguous range of a staging area that holds images.

    Attributes:
        unit: index of the first unit of `UNIT_BYTES`.
        position: index of the first image. Image ``i`` is at byte ``i * stride`` of the area, not of the
            allocation.
    """

    unit: int
    units: int
    position: int


class StagingArea:
    """Memory that holds images during a transfer. Thread-safe.

    Attributes:
        device: torch device of the memory.
        units: number of units of `UNIT_BYTES`; 0 if the area is empty.
    """

    def __init__(self, size: int, like: Region, memory: torch.Tensor | None = None) -> None:
        """Allocate the memory.

        Args:
            size: bytes, rounded down to whole units; 0 for an empty area.
            like: region of the KV cache. The area gets the same kind of memory.
            memory: memory to use, uint8 of shape (size,), which begins at a page; None to allocate it.
        """
        self.device = "cpu" if like.memory == "DRAM" else f"cuda:{like.device}"
        self.units = size // UNIT_BYTES
        if memory is None:
            room = self.units * UNIT_BYTES + _ALIGNMENT
            memory = torch.empty(room, dtype=torch.uint8, device=self.device)
        self._memory = memory
        address = -(-self._memory.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        self.region = Region(address, max(self.units * UNIT_BYTES, 1), like.memory, like.device)
        self._space = AddressSpace([self.region])
        self._taken = bytearray(self.units)
        self._lock = threading.Lock()

    @property
    def largest_image(self) -> int:
        """Size in bytes of the largest image that may use the area: a quarter, so that several fit."""
        return self.units * UNIT_BYTES // 4

    @property
    def used_units(self) -> int:
        return sum(self._taken)

    def images(self, stride: int) -> StagedImages:
        """Return a view of the whole area as a sequence of images, one every `stride` bytes."""
        return StagedImages(self._space, self.region.address, stride)

    def allocate(self, images: int, stride: int) -> Allocation | None:
        """Allocate contiguous memory for `images` images, or return None if not enough is free now."""
        # Room for one more image: images are counted from the start of the area, so the allocation may start
        # inside an image.
        units = -(-(images + 1) * stride // UNIT_BYTES)
        with self._lock:
            unit = self._taken.find(bytes(units))
            if unit < 0:
                return None
            self._taken[unit : unit + units] = b"\1" * units
        return Allocation(unit, units, -(-unit * UNIT_BYTES // stride))

    def free(self, allocation: Allocation) -> None:
        """Free an allocation. No transfer may be using it."""
        with self._lock:
            self._taken[allocation.unit : allocation.unit + allocation.units] = bytes(allocation.units)
