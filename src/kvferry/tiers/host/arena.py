"""The arena: host memory that all ranks of a node share.

The owner creates the arena. Other processes attach to it with its `SharedFile`. All see the same bytes at
different addresses, so positions in it are offsets.

Threads allocate the memory, from the beginning to the end. Chunks use only what is allocated (`ready_bytes`),
so memory that the machine turns out to lack does not kill an engine.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from kvferry.common.errors import ConfigError
from kvferry.common.units import format_bytes
from kvferry.geometry import Region
from kvferry.memory.address_space import AddressSpace
from kvferry.memory.copies import StagedImages
from kvferry.memory.pages import PagePopulator
from kvferry.memory.shared_memory import SharedFile, map_shared
from kvferry.tiers.host.settings import check_available, too_large

logger = logging.getLogger(__name__)


class Arena:
    """The arena, as mapped into one process. Use `create` in the owner, and `attach` in other processes.

    Attributes:
        handle: handle with which other processes attach.
        memory: bytes of the arena, uint8 of shape (size,), initially zero. Do not use it after `close`.
        region: address range of the same memory in this process.
        populating: background threads that allocate the memory; None in other processes than the owner.
    """

    def __init__(self, fd: int, handle: SharedFile) -> None:
        """Map the file of an arena, whose descriptor `close` closes. Call `create` or `attach` instead."""
        self._fd = fd
        self.handle = handle
        self._map, self._skip = map_shared(fd, handle.size)
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8, handle.size, self._skip)
        self.region = Region(self.memory.ctypes.data, handle.size, "DRAM", 0)
        self._space = AddressSpace([self.region])
        self.populating: PagePopulator | None = None

    @property
    def is_allocated(self) -> bool:
        """Whether all memory is allocated, or the rest cannot be. The owner knows it."""
        return self.populating is None or self.populating.ended

    @property
    def ready_bytes(self) -> int:
        """Number of bytes, from the beginning, that are allocated and can be used. The owner knows it."""
        return self.handle.size if self.populating is None else self.populating.ready_bytes

    @classmethod
    def create(cls, size: int, on_allocated: Callable[[], None] = lambda: None) -> Arena:
        """Create an arena of `size` bytes, rounded up to whole pages. This process becomes its owner.

        Its memory is allocated in the background, except for the first `POPULATE_STEP_BYTES`. The thread that
        ends last calls `on_allocated`.

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

        def on_end(pages: PagePopulator) -> None:
            if pages.failure:
                found = f"only {format_bytes(pages.ready_bytes)} could be allocated ({pages.failure})"
                logger.error(too_large(size, found))
            on_allocated()

        try:
            arena.populating = PagePopulator(handle.fd, arena.region, on_end)
        except OSError as error:
            arena.close()
            raise ConfigError(too_large(size, str(error))) from error
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

    def wait_allocated(self) -> None:
        """Wait until all memory is allocated, so that no thread of the arena disturbs a measurement."""
        if self.populating is not None:
            self.populating.wait()

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
        if self.populating is not None:
            self.populating.stop()
            self.populating = None
        os.close(self._fd)
        self._fd = -1
        del self.memory, self._space
        # A view of the memory is still in use; its deletion unmaps the memory.
        with suppress(BufferError):
            self._map.close()
