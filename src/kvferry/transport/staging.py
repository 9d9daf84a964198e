"""Staging memory, which holds packed cells during a transfer.

A cell is the unit of transfer: the largest number of tokens that divides the block sizes of both sides. An
image is one cell packed into contiguous memory. A segment is a run of cells that move together.

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
    """A contiguous range of a staging area that holds images (packed cells).

    Attributes:
        unit: index of the first unit. A unit is `UNIT_BYTES` of the area.
        units: number of units.
        position: index of the first image. Image ``i`` is at byte ``i * stride`` of the area, not of the
            allocation.
    """

    unit: int
    units: int
    position: int


class StagingArea:
    """Memory that holds packed cells (parts of blocks) during a transfer. Thread-safe.

    Attributes:
        region: memory of the area.
        device: torch device of the memory.
        units: number of units of `UNIT_BYTES` in the area; 0 if the area is empty.
    """

    def __init__(self, size: int, like: Region, memory: torch.Tensor | None = None) -> None:
        """Allocate the memory of the staging area.

        Args:
            size: size of the area in bytes, rounded down to whole units; 0 for an empty area.
            like: region of the KV cache. The area gets the same kind of memory on the same device.
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
        """Size in bytes of the largest image (packed cell) that may use the area.

        It is a quarter of the area, so that several images fit.
        """
        return self.units * UNIT_BYTES // 4

    @property
    def used_units(self) -> int:
        """Number of units that are allocated."""
        return sum(self._taken)

    def images(self, stride: int) -> StagedImages:
        """Return a view of the whole staging area as a sequence of images.

        An image is a cell (part of a block that is copied as one unit), packed into contiguous memory.

        Args:
            stride: bytes from the start of one image to the start of the next.
        """
        return StagedImages(self._space, self.region.address, stride)

    def allocate(self, images: int, stride: int) -> Allocation | None:
        """Allocate contiguous memory for images (packed cells). Return None if not enough memory is free now.

        Args:
            images: number of images.
            stride: bytes from one image to the next.
        """
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
        """Free an allocation of staging memory. No transfer may be using the allocation."""
        with self._lock:
            self._taken[allocation.unit : allocation.unit + allocation.units] = bytes(allocation.units)


def image_capacity(length: int, stride: int) -> int:
    """Return the number of images (packed cells) that fit in staging memory.

    Args:
        length: size of the memory in bytes.
        stride: bytes from one image to the next.
    """
    return length // stride
