"""Staging memory: where images are while they travel.

A worker has two areas, registered with the transport: *outgoing*, into which it gathers for others, and
*landing*, into which it reads what it then scatters. An area is handed out in units; what is handed out is a
`Allocation`, as long as the images of one chunk.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from kvferry.geometry import Region
from kvferry.memory.address_space import AddressSpace
from kvferry.memory.cell_copies import StagedCells

UNIT_BYTES = 1 << 20
_ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class Allocation:
    """Some units in a row.

    Attributes:
        unit, units: the first, and how many.
        position: images of a stride are numbered from the start of the area; this is the first in the lot.
    """

    unit: int
    units: int
    position: int


class StagingArea:
    """Memory of one direction; any thread takes and gives back.

    Attributes:
        region: to be registered with the transport.
        device: torch's name for where it is, which is where the cache is.
        units: how many there are.
    """

    def __init__(self, size: int, like: Region) -> None:
        """Allocate, in memory of the kind that `like` is.

        Args:
            size: bytes, rounded down to whole units; 0 for an area that has no room.
            like: a region of the cache.
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
        """Bytes of the largest image that is handled: several of them must find room at a time."""
        return self.units * UNIT_BYTES // 4

    def slots(self, stride: int) -> StagedCells:
        """Images of a stride, numbered from the start of the area."""
        return StagedCells(self._space, self.region.address, stride)

    def take(self, images: int, stride: int) -> Allocation | None:
        """Room for so many images of a stride, None if there is none now."""
        # One more: images are numbered from the start of the area, and a lot begins anywhere.
        units = -(-(images + 1) * stride // UNIT_BYTES)
        with self._lock:
            unit = self._taken.find(bytes(units))
            if unit < 0:
                return None
            self._taken[unit : unit + units] = b"\1" * units
        return Allocation(unit, units, -(-unit * UNIT_BYTES // stride))

    def give_back(self, lot: Allocation) -> None:
        """Nothing reads or writes these units any more."""
        with self._lock:
            self._taken[lot.unit : lot.unit + lot.units] = bytes(lot.units)


def cell_capacity(length: int, stride: int) -> int:
    """How many images of a stride an area of `length` bytes has room for."""
    return length // stride
