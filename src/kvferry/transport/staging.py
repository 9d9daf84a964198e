"""Staging memory, which holds packed cells during a transfer.

A cell is the unit of transfer: the largest number of tokens that divides the block sizes of both sides. An
image is one cell packed into contiguous memory. A segment is a run of cells that move together.

A worker has two areas, both registered with the transport. It gathers cells for other workers into the
*outgoing* area. It reads images into the *landing* area before it scatters them into blocks. Areas are
allocated in units of `UNIT_BYTES`. An `Allocation` holds the images of one segment.

An outgoing area in host memory is a memory file if the system allows it, so that other workers of the machine
can map it (`SharedArea`) and need no READ.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass

import numpy as np
import torch

from kvferry.errors import ConfigError, TransferError
from kvferry.geometry import Region
from kvferry.memory.address_space import AddressSpace
from kvferry.memory.huge_pages import map_shared
from kvferry.memory.sealed import SharedFile
from kvferry.memory.staging_copies import StagedImages

logger = logging.getLogger(__name__)

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

    A worker has one area from which others read, and one into which it reads.

    Attributes:
        region: memory of the area, to be registered with the transport.
        device: torch device of the memory, the same as that of the KV cache.
        units: number of units of `UNIT_BYTES` in the area; 0 if the area is empty.
        file: memory file that other processes of this machine can map; None if there is none.
    """

    def __init__(self, size: int, like: Region, *, shared: bool = False) -> None:
        """Allocate the memory of the staging area.

        Args:
            size: size of the area in bytes, rounded down to whole units; 0 for an empty area.
            like: region of the KV cache. The area gets the same kind of memory on the same device.
            shared: True to allocate a memory file, if the area is in host memory and the system allows it.
        """
        self.device = "cpu" if like.memory == "DRAM" else f"cuda:{like.device}"
        self.units = size // UNIT_BYTES
        self.file: SharedFile | None = None
        if shared and self.units and like.memory == "DRAM" and (made := _new_file(self.units * UNIT_BYTES)):
            self.file, self._memory = made
        else:
            room = self.units * UNIT_BYTES + _ALIGNMENT
            self._memory = torch.empty(room, dtype=torch.uint8, device=self.device)
        address = -(-self._memory.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        self.region = Region(address, max(self.units * UNIT_BYTES, 1), like.memory, like.device)
        self._space = AddressSpace([self.region])
        self._taken = bytearray(self.units)
        self._lock = threading.Lock()

    def close(self) -> None:
        """Let no further process map the area. The memory stays while this object or a reader uses it."""
        if self.file is not None:
            os.close(self.file.fd)
            self.file = None

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


class SharedArea:
    """The outgoing staging area of another worker of this machine, mapped to be read."""

    def __init__(self, file: SharedFile) -> None:
        """Map the area.

        Args:
            file: memory file of the area.

        Raises:
            TransferError: the file cannot be opened or mapped here, for example because its owner runs on
                another machine, or has ended.
        """
        fd = file.open(writable=False)
        try:
            self._memory = _mapped(fd, file.size, writable=False)
        except OSError as error:
            raise TransferError(f"the peer's staging area cannot be mapped: {error.strerror}") from error
        finally:
            os.close(fd)
        self._region = Region(self._memory.data_ptr(), file.size)
        self._space = AddressSpace([self._region])

    def images(self, stride: int) -> StagedImages:
        """Return a view of the whole area as a sequence of images, as `StagingArea.images`."""
        return StagedImages(self._space, self._region.address, stride)


def _new_file(size: int) -> tuple[SharedFile, torch.Tensor] | None:
    """Create a memory file and map it; return None if this system does not allow it."""
    try:
        file = SharedFile.create(size)
    except ConfigError as error:
        logger.info("engines of this machine cannot map each other's staging memory: %s", error)
        return None
    try:
        return file, _mapped(file.fd, size, writable=True)
    except OSError as error:
        logger.info("engines of this machine cannot map each other's staging memory: %s", error)
        os.close(file.fd)
        return None


def _mapped(fd: int, size: int, *, writable: bool) -> torch.Tensor:
    """Map a memory file until the tensor is deleted, uint8 of shape (size,)."""
    mapping, skip = map_shared(fd, size, writable=writable)
    return torch.from_numpy(np.frombuffer(mapping, np.uint8, size, skip))


def image_capacity(length: int, stride: int) -> int:
    """Return the number of images (packed cells) that fit in staging memory.

    Args:
        length: size of the memory in bytes.
        stride: bytes from one image to the next.
    """
    return length // stride
