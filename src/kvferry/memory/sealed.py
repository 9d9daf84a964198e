"""Shared memory files of a fixed size: no process can cut off memory that others have mapped.

A memory file (memfd) has no name in any file system, so a crash leaves no file behind, and the size of
``/dev/shm`` (64 MiB in many containers) does not limit it. The kernel frees its memory when the last process
that maps it ends. Another process of the same machine, user and process namespace opens it as
``/proc/<pid>/fd/<fd>`` of its owner.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from kvferry.errors import ConfigError, TransferError
from kvferry.operating_system import fcntl, is_linux
from kvferry.units import format_bytes

_SEALED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if is_linux() else 0


@dataclass(frozen=True, slots=True)
class SharedFile:
    """What another process needs to open a sealed memory file."""

    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]  # id of the process that owns the file
    fd: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]  # number of the file's descriptor in that process
    token: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]  # random id of the file, 32 hex digits
    size: Annotated[int, msgspec.Meta(ge=1, lt=1 << 45)]  # size of the file in bytes

    @classmethod
    def create(cls, size: int) -> SharedFile:
        """Create a file as `sealed_file` does. Its descriptor, `fd`, is to be closed by the caller."""
        # Keeps another process from taking a later file of this descriptor for this one.
        token = secrets.token_hex(16)
        return cls(os.getpid(), sealed_file(_file_name(token), size), token, size)

    def open(self, *, writable: bool) -> int:
        """Open the file, which another process of this machine owns, and return a descriptor.

        Raises:
            TransferError: the owner has ended, its descriptor now refers to another file, its size is not
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
        if found != f"/memfd:{_file_name(self.token)} (deleted)":
            raise TransferError(
                f"{path} is {found}, expected memory {self.token} of {self.size} bytes: its owner has ended"
            )


def _file_name(token: str) -> str:
    return f"kvferry-{token}"


def sealed_file(name: str, size: int) -> int:
    """Create a memory file whose size no process can change any more, and return its descriptor.

    Raises:
        ConfigError: the file cannot be created or sealed, for example because of a limit of the file size or
            the container's seccomp filter.
    """
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
