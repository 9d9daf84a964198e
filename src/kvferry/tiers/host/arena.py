"""The arena: host memory that all ranks of a node share.

The owner creates the arena. Other processes attach to it with its `SharedFile`. All see the same bytes at
different addresses, so positions in it are offsets. All memory is allocated at once, so too little memory is
an error at start, and does not kill an engine later.
"""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from kvferry.common.errors import ConfigError
from kvferry.geometry import Region
from kvferry.memory.address_space import AddressSpace
from kvferry.memory.copies import StagedImages
from kvferry.memory.shared_memory import HugePageCollapser, SharedFile, map_shared
from kvferry.tiers.host.settings import check_available, too_large

# MADV_POPULATE_WRITE, which allocates memory at once or fails. Linux has it since 5.14.
_POPULATE_WRITE = 23
_STEP_BYTES = 256 << 20


class Arena:
    """The arena, as mapped into one process. Use `create` in the owner, and `attach` in other processes.

    Attributes:
        handle: handle with which other processes attach.
        memory: bytes of the arena, uint8 of shape (size,), initially zero. Do not use it after `close`.
        region: address range of the same memory in this process.
        collapsing: background thread that moves the memory into huge pages; None in other processes than the
            owner.
    """

    def __init__(self, fd: int, handle: SharedFile) -> None:
        """Map the file of an arena, whose descriptor `close` closes. Call `create` or `attach` instead."""
        self._fd = fd
        self.handle = handle
        self._map, self._skip = map_shared(fd, handle.size)
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8, handle.size, self._skip)
        self.region = Region(self.memory.ctypes.data, handle.size, "DRAM", 0)
        self._space = AddressSpace([self.region])
        self.collapsing: HugePageCollapser | None = None

    @classmethod
    def create(cls, size: int) -> Arena:
        """Create an arena of `size` bytes, rounded up to whole pages. This process becomes its owner.

        Raise ConfigError if the machine has too little memory, or does not support sealed memory files.
        """
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        check_available(size)
        try:
            handle = SharedFile.create(size)
        except ConfigError as error:
            raise ConfigError(f"host tier: {error}, or lower or remove the host tier's capacity") from error
        try:
            arena = cls(handle.fd, handle)
        except OSError as error:
            os.close(handle.fd)
            raise ConfigError(too_large(size, str(error))) from error
        arena._populate()
        arena.collapsing = HugePageCollapser(arena.region)
        return arena

    @classmethod
    def attach(cls, handle: SharedFile) -> Arena:
        """Map an arena that another process of this machine created. Raise TransferError if that fails."""
        fd = handle.open(writable=True)
        try:
            return cls(fd, handle)
        except BaseException:
            os.close(fd)
            raise

    def slots(self, offset: int, stride: int) -> StagedImages:
        """Return cells that are `stride` bytes apart in the arena, the first at `offset`, for copies."""
        return StagedImages(self._space, self.region.address + offset, stride)

    def bytes_at(self, offset: int, size: int) -> memoryview:
        return memoryview(self._map)[self._skip + offset : self._skip + offset + size]

    def close(self) -> None:
        """Unmap the arena in this process. Once the owner has closed the arena, no process can attach.

        Idempotent. The memory stays mapped until the last array or view of the memory is deleted.
        """
        if self._fd < 0:
            return
        if self.collapsing is not None:
            self.collapsing.stop()
        os.close(self._fd)
        self._fd = -1
        del self.memory, self._space
        # A view of the memory is still in use; its deletion unmaps the memory.
        with suppress(BufferError):
            self._map.close()

    def _populate(self) -> None:
        """Allocate all memory of the arena now, or raise ConfigError."""
        size = self.handle.size
        try:
            for at in range(0, size, _STEP_BYTES):  # in steps, so that other threads can run
                step = min(_STEP_BYTES, size - at)
                try:
                    self._map.madvise(_POPULATE_WRITE, self._skip + at, step)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    # Before Linux 5.14. This allocates, too, but does not map the memory into this process.
                    os.posix_fallocate(self._fd, at, step)
        except OSError as error:
            self.close()
            raise ConfigError(too_large(size, str(error))) from error
