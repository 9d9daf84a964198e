"""Staging memory, which holds images during a transfer, and the settings and resources of a worker's lanes.

A worker has two areas that are registered with the transport. It gathers cells for other workers into the
*outgoing* area. It reads images into the *landing* area before it scatters them into blocks. A third area is
host memory that workers of the same machine map (`SharedArea`). Areas are allocated in units of
`UNIT_BYTES`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
import zmq

from kvferry.common.errors import KVFerryError, TransferError
from kvferry.geometry import RankGeometry, Region
from kvferry.memory.address_space import AddressSpace
from kvferry.memory.copies import StagedImages
from kvferry.memory.device_copy import HostRegistration
from kvferry.memory.shared_memory import SharedFile, map_shared
from kvferry.transport.agent import Agent
from kvferry.transport.costs import TransferSettings

logger = logging.getLogger(__name__)

UNIT_BYTES = 1 << 20
_ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class Allocation:
    """A range of units that holds a segment's images, of which the first is number `position` of the area."""

    unit: int
    units: int
    position: int


class StagingArea:
    """Memory that holds images during a transfer, in `units` of `UNIT_BYTES`. Thread-safe."""

    def __init__(self, size: int, like: Region, memory: torch.Tensor | None = None) -> None:
        """Allocate `size` bytes, rounded down to whole units, of the same kind of memory as `like`.

        `memory` is used instead if given: uint8 of shape (size,), from the start of a page on.
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
        """Bytes of the largest image that may use the area: a quarter, so that several fit."""
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


class SharedArea(StagingArea):
    """A staging area in a memory file: its owner gathers into it, others of the machine scatter from it."""

    def __init__(self, file: SharedFile, fd: int, like: Region, *, writable: bool) -> None:
        """Map an open file, and register it with CUDA if `like` is on a GPU, or raise TransferError."""
        try:
            mapping, skip = map_shared(fd, file.size, writable=writable)
        except OSError as error:
            raise TransferError(f"shared memory cannot be mapped: {error.strerror}") from error
        memory = torch.from_numpy(np.frombuffer(mapping, np.uint8, file.size, skip))
        super().__init__(file.size, Region(0, 1), memory)
        self.file, self._fd = file, -1
        self._registration = None if like.memory == "DRAM" else HostRegistration(self.region)

    @classmethod
    def create(cls, size: int, like: Region) -> Self:
        """Create the file, of whole units. No memory is allocated until it is used, except by CUDA."""
        file = SharedFile.create(size)
        try:
            made = cls(file, file.fd, like, writable=True)
        except BaseException:
            os.close(file.fd)
            raise
        made._fd = file.fd
        return made

    @classmethod
    def map(cls, file: SharedFile, like: Region) -> Self:
        """Map another worker's file. Raise TransferError if it has ended, or runs on another machine."""
        writable = like.memory != "DRAM"  # CUDA refuses to register memory that is mapped to be read only
        fd = file.open(writable=writable)
        try:
            return cls(file, fd, like, writable=writable)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Let no further worker map the file, if this one owns it. The memory stays mapped while in use."""
        if self._registration is not None:
            self._registration.close()
        if self._fd >= 0:
            os.close(self._fd)


def make_outgoing_file(size: int, like: Region) -> SharedArea | None:
    """Return a new `SharedArea`; None, with a line in the log, if this system does not allow it."""
    try:
        return SharedArea.create(size, like)
    except KVFerryError as error:
        logger.info("engines of this machine cannot map this engine's staging memory: %s", error)
        return None


@dataclass(frozen=True, slots=True)
class LaneResources:
    """The agent, memory and settings of a lane. Only the lane's thread uses them."""

    agent: Agent
    geometry: RankGeometry
    landing: StagingArea  # images are read into it; all lanes share it
    words: npt.NDArray[np.uint64]  # words of peers are read into it; the lane registers it
    context: zmq.Context[Any]
    free_words: list[int] = field(default_factory=list)  # indices that packed reads take and return
    settings: TransferSettings = field(default_factory=TransferSettings)
    clock: Callable[[], float] = time.monotonic

    @property
    def words_region(self) -> Region:
        return Region(int(self.words.ctypes.data), self.words.nbytes)
