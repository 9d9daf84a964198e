"""Host memory: shared memory files of a fixed size, and how much can still be allocated.

A memory file (memfd) has no name in any file system, so a crash leaves no file behind, and the size of
``/dev/shm`` (64 MiB in many containers) does not limit it. The kernel frees its memory when the last process
that maps it ends. It is *sealed*: no process can cut off memory that others have mapped.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, TypeAlias

import msgspec

from kvferry.common.errors import ConfigError, TransferError
from kvferry.common.machine import fcntl, is_linux
from kvferry.common.units import format_bytes

_SEALED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if is_linux() else 0

# MAP_FIXED replaces an existing mapping at the address. MAP_NORESERVE reserves addresses, but no memory.
_FIXED, _NORESERVE = 0x10, 0x4000
_LARGE_PAGE = 2 << 20

# For each cgroup version: pattern of a group's line in /proc/self/cgroup, root directory, file with the
# limit, file with the usage, prefix of the fields of memory.stat that include child groups.
_VERSIONS = (
    (r"^0::(/.*)$", "/sys/fs/cgroup", "memory.max", "memory.current", ""),
    (
        r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:(/.*)$", "/sys/fs/cgroup/memory", "memory.limit_in_bytes",
        "memory.usage_in_bytes", "total_",
    ),
)  # fmt: skip

# Returns the text of a file; None if it cannot be read.
Read: TypeAlias = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class SharedFile:
    """What another process of the same user and process namespace needs to open a sealed memory file."""

    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]  # id of the process that owns the file
    fd: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]  # number of the file's descriptor in that process
    token: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]  # random id of the file, 32 hex digits
    size: Annotated[int, msgspec.Meta(ge=1, lt=1 << 45)]  # size of the file in bytes

    @classmethod
    def create(cls, size: int) -> SharedFile:
        """Create a file as `sealed_file` does. The caller closes `fd`."""
        # Keeps another process from taking a later file of this descriptor for this one.
        token = secrets.token_hex(16)
        return cls(os.getpid(), sealed_file(f"kvferry-{token}", size), token, size)

    def open(self, *, writable: bool) -> int:
        """Open the file, which another process of this machine owns, and return a descriptor.

        Raise TransferError if the owner has ended, its descriptor now refers to another file, its size is not
        sealed, or this process may not open it.
        """
        path = f"/proc/{self.pid}/fd/{self.fd}"
        try:
            # Before it is opened: to open another kind of file could block.
            self._check(path, str(Path(path).readlink()))
            fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise TransferError(
                f"no shared memory at {path}: {error.strerror}; its owner has ended, or runs as another "
                "user or in another process namespace"
            ) from error
        try:
            # Again: the owner may have ended in between, and its process id may be another's.
            self._check(path, str(Path(f"/proc/self/fd/{fd}").readlink()))
            size, seals = os.fstat(fd).st_size, fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if size != self.size or seals & _SEALED != _SEALED:
                raise TransferError(
                    f"{path} has {size} bytes and seals {seals:#x}, expected {self.size} bytes and seals "
                    f"{_SEALED:#x}: its owner has ended"
                )
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _check(self, path: str, found: str) -> None:
        if found != f"/memfd:kvferry-{self.token} (deleted)":
            raise TransferError(
                f"{path} is {found}, expected memory {self.token} of {self.size} bytes: its owner has ended"
            )


def sealed_file(name: str, size: int) -> int:
    """Create a memory file whose size no process can change, and return its descriptor."""
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise _no_seals("memfd_create", error) from error
    try:
        os.ftruncate(fd, size)
    except OSError as error:
        os.close(fd)
        raise ConfigError(
            f"a memory file of {format_bytes(size)} cannot be made: {os.strerror(error.errno or 0)}; raise "
            "the limit of a file's size (ulimit -f unlimited)"
        ) from error
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALED)
    except OSError as error:
        os.close(fd)
        raise _no_seals("fcntl with F_ADD_SEALS", error) from error
    return fd


def _no_seals(call: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"{call} fails here ({os.strerror(error.errno or 0)}), so processes can share no memory safely; "
        "allow memfd_create and F_ADD_SEALS in the container's seccomp profile"
    )


def map_shared(fd: int, size: int, *, writable: bool = True) -> tuple[mmap.mmap, int]:
    """Map a shared memory file at a multiple of the size of a huge page.

    Returns:
        The mapping, and the byte offset in it at which the file begins.
    """
    # Reserve a huge page more than needed, then map the file over it at the first multiple.
    room = mmap.mmap(-1, size + _LARGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    skip = -address % _LARGE_PAGE
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    there = libc.mmap(
        ctypes.c_void_p(address + skip),
        ctypes.c_size_t(size),
        mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0),
        mmap.MAP_SHARED | _FIXED,
        fd,
        ctypes.c_long(0),
    )
    if there != address + skip:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return room, skip


def read_kernel_file(path: str) -> str | None:
    """Return the text of a file of ``/proc`` or ``/sys``; None if it cannot be read."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return None


def available_memory(read: Read = read_kernel_file) -> tuple[int, str] | None:
    """Return the bytes that this process can still allocate, and what limits them; None if unknown."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", read("/proc/meminfo") or "", re.MULTILINE)
    room = [(int(found[1]) << 10, "available on this machine")] if found else []
    room += [(left, "left to this control group") for left in _left_to_groups(read)]
    return min(room, default=None)


def _left_to_groups(read: Read) -> Iterator[int]:
    """Yield how many bytes each limited control group has left, from this process's group up."""
    told = read("/proc/self/cgroup") or ""
    for line, root, limit, used, prefix in _VERSIONS:
        path = found[1] if (found := re.search(line, told, re.MULTILINE)) else "/"
        # A container may see its own group as the root, although the path is the one that the host uses.
        for above in (PurePosixPath(path), *PurePosixPath(path).parents):
            group = root + str(above).rstrip("/")
            most, now = read(f"{group}/{limit}") or "", read(f"{group}/{used}") or ""
            if most.isdigit() and now.isdigit():
                # The kernel counts cached file pages of a group as used, but reclaims them first.
                stat = read(f"{group}/memory.stat") or ""
                pages = re.findall(rf"^{prefix}(?:in)?active_file (\d+)$", stat, re.MULTILINE)
                yield max(0, int(most) - max(0, int(now) - sum(map(int, pages))))
