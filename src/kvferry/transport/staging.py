"""Staging memory: where packed images of cells lie while they travel.

A worker has two areas, both registered with the transport. It gathers cells for other workers into the
*outgoing* area, and reads images into the *landing* area before it scatters them. An area is allocated in
units of `UNIT_BYTES`. One `Allocation` holds the images of one segment.
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
    """Consecutive units of a staging area.

    Attributes:
        unit, units: index of the first unit, number of units.
        position: index of the first image, counted from the start of the area in steps of the image stride.
    """

    unit: int
    units: int
    position: int


class StagingArea:
    """Staging memory for one direction. Thread-safe.

    Attributes:
        region: the memory to register with the transport.
        device: torch device of the memory, the same as the cache's.
        units: number of units.
    """

    def __init__(self, size: int, like: Region) -> None:
        """Allocate the memory.

        Args:
            size: bytes, rounded down to whole units; 0 for an area without room.
            like: a region of the cache; the area gets the same kind of memory on the same device.
        """
        self.device = "cpu" if like.memory == "DRAM" else f"cuda:{like.device}"
        self.units = size // UNIT_BYTES
        self._memory = torch.empty(
            self.units * UNIT_BYTES + _ALIGNMENT, dtype=torch.uint8, device=self.device
        )
        address = -(-self._memory.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        self.region = Region(address, max(self.units * UNIT_BYTES, 1), like.memory, like.device)
        self._space = AddressSpace([self.region])
        self._taken = bytearray(self.units)
        self._lock = threading.Lock()

    @property
    def largest_image(self) -> int:
        """Bytes of the largest image that may use the area: a quarter, so that several fit."""
        return self.units * UNIT_BYTES // 4

    def images(self, stride: int) -> StagedImages:
        """Return the images of the whole area, `stride` bytes apart."""
        return StagedImages(self._space, self.region.address, stride)

    def allocate(self, images: int, stride: int) -> Allocation | None:
        """Allocate room for `images` images, `stride` bytes apart; return None if none is free now."""
        # One image more: images count from the start of the area, and an allocation may begin between two.
        units = -(-(images + 1) * stride // UNIT_BYTES)
        with self._lock:
            unit = self._taken.find(bytes(units))
            if unit < 0:
                return None
            self._taken[unit : unit + units] = b"\1" * units
        return Allocation(unit, units, -(-unit * UNIT_BYTES // stride))

    def free(self, allocation: Allocation) -> None:
        """Free an allocation. No READ or copy may use it any more."""
        with self._lock:
            self._taken[allocation.unit : allocation.unit + allocation.units] = bytes(allocation.units)


def image_capacity(length: int, stride: int) -> int:
    """Return how many images, `stride` bytes apart, fit in `length` bytes."""
    return length // stride
