"""Host memory that all ranks of a node share: the arena.

One process creates it, the others attach with an `ArenaHandle`. All see the same bytes at different
addresses, so positions are offsets. `host.slot_table` decides who may write where.

It is a memfd: a file of shared memory without a name in any file system. It does not use ``/dev/shm``, so a
crash leaves nothing there, and the size of ``/dev/shm`` (64 MiB in many containers) does not limit it. The
kernel frees it when the last process that maps it ends. It is sealed against shrinking, so that no process
can make another's access fail. All of it is allocated at once: a lack of memory is an error at start, not a
killed engine later. A background thread moves it to large pages while it is in use.

Attaching opens ``/proc/<pid>/fd/<fd>`` of the owner: same machine, same user, same process namespace. The
token identifies the file, so a new process with the same id is not mistaken for the owner.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvferry.errors import ConfigError, TransferError
from kvferry.geometry import Region
from kvferry.memory.address_space import AddressSpace
from kvferry.memory.available import available_memory
from kvferry.memory.huge_pages import HugePageCollapser, map_shared
from kvferry.memory.sealed import sealed_file
from kvferry.memory.staging_copies import StagedImages
from kvferry.units import format_bytes

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, since Linux 5.14: allocates memory at once, or fails."""
_STEP_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class ArenaHandle:
    """A handle with which other processes attach to an arena.

    Attributes:
        pid, fd: the owning process and its file descriptor.
        token: 32 random hexadecimal digits, unique to the arena.
        size: bytes.
    """

    pid: int
    fd: int
    token: str
    size: int


class Arena:
    """One process's mapping of the shared memory. `create` or `attach` returns it.

    Attributes:
        name: the handle for other processes.
        memory: shared bytes, uint8 of shape (size,), initially zero. Must not be used after `close`.
        region: the same memory, with addresses of this process.
        collapsing: the owner's thread that moves memory to large pages; None in other processes.
    """

    def __init__(self, fd: int, name: ArenaHandle) -> None:
        """Map the file and take over `fd`. Use `create` or `attach`."""
        self._fd = fd
        self.name = name
        self._map, self._skip = map_shared(fd, name.size)
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8, name.size, self._skip)
        self.region = Region(self.memory.ctypes.data, name.size, "DRAM", 0)
        self._space = AddressSpace([self.region])
        self.collapsing: HugePageCollapser | None = None

    @classmethod
    def create(cls, size: int) -> Arena:
        """Allocate `size` bytes, rounded up to whole pages; this process becomes the owner.

        Raises:
            ConfigError: the machine has too little memory, or does not support sealed memory files.
        """
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        available, where = _available()
        if size > available:
            raise ConfigError(_too_large(size, f"{format_bytes(available)} are {where}"))
        token = secrets.token_hex(16)
        fd = sealed_file(_file_name(token), size)
        try:
            arena = cls(fd, ArenaHandle(os.getpid(), fd, token, size))
        except OSError as error:
            os.close(fd)
            raise ConfigError(_too_large(size, str(error))) from error
        arena._populate()
        arena.collapsing = HugePageCollapser(arena.region)
        return arena

    @classmethod
    def attach(cls, name: ArenaHandle) -> Arena:
        """Map the arena that another process of this machine created.

        Raises:
            TransferError: the owner has ended, or its descriptor now refers to another file.
        """
        path = f"/proc/{name.pid}/fd/{name.fd}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise TransferError(
                f"no shared memory at {path}: {error.strerror}; its owner has ended, or runs as another "
                "user or in another process namespace"
            ) from error
        try:
            found, size = str(Path(f"/proc/self/fd/{fd}").readlink()), os.fstat(fd).st_size
            if _file_name(name.token) not in found or size != name.size:
                raise TransferError(
                    f"{path} is {found} of {size} bytes, expected arena {name.token} of {name.size} "
                    "bytes: its owner has ended"
                )
            return cls(fd, name)
        except BaseException:
            os.close(fd)
            raise

    def slots(self, offset: int, stride: int) -> StagedImages:
        """Return images that are `stride` bytes apart, the first at `offset`, for `StagingCopies`."""
        return StagedImages(self._space, self.region.address + offset, stride)

    def bytes_at(self, offset: int, size: int) -> memoryview:
        """Return a writable view of `size` bytes from `offset` on."""
        return memoryview(self._map)[self._skip + offset : self._skip + offset + size]

    def close(self) -> None:
        """Release the mapping. After the owner has closed it, no process can attach. Idempotent.

        The memory stays mapped until the last array over it is deleted.
        """
        if self._fd < 0:
            return
        if self.collapsing is not None:
            self.collapsing.stop()
        os.close(self._fd)
        self._fd = -1
        del self.memory, self._space
        with suppress(BufferError):
            self._map.close()

    def _populate(self) -> None:
        """Allocate all memory now: mapped since Linux 5.14, reserved in the file on older kernels.

        Raises:
            ConfigError: there is not enough memory.
        """
        size = self.name.size
        try:
            for at in range(0, size, _STEP_BYTES):  # in steps, so that other threads can run
                step = min(_STEP_BYTES, size - at)
                try:
                    self._map.madvise(_POPULATE_WRITE, self._skip + at, step)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    os.posix_fallocate(self._fd, at, step)
        except OSError as error:
            self.close()
            raise ConfigError(_too_large(size, str(error))) from error


def _file_name(token: str) -> str:
    return f"kvferry-{token}"


def available_bytes() -> int:
    """Return the bytes of memory available to this process, within its machine and control group.

    Raises:
        ConfigError: /proc/meminfo cannot be read.
    """
    return _available()[0]


def _available() -> tuple[int, str]:
    if (found := available_memory()) is None:
        raise ConfigError(
            "host tier: cannot read the available memory from /proc/meminfo; mount /proc, or configure "
            "no tiers"
        )
    return found


def _too_large(size: int, found: str) -> str:
    return f"host tier: {format_bytes(size)} of shared memory, but {found}; lower its capacity"
