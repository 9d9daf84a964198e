"""Shared memory files of a fixed size: no process can cut off memory that others have mapped."""

from __future__ import annotations

import os

from kvferry.errors import ConfigError
from kvferry.operating_system import fcntl
from kvferry.units import format_bytes


def sealed_file(name: str, size: int) -> int:
    """Create a memory file (memfd) whose size is sealed, and return its file descriptor.

    No process can change the size any more, so processes that map the file can rely on it.

    Args:
        name: name of the file, as ``/proc`` shows it.
        size: size of the file in bytes.

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
            f"host tier: a memory file of {format_bytes(size)} cannot be made: "
            f"{os.strerror(error.errno or 0)}; lower its capacity, or raise the limit of a file's size "
            "(ulimit -f unlimited)"
        ) from error
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(fd)
        raise _no_seals("fcntl with F_ADD_SEALS", error) from error
    return fd


def _no_seals(call: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"host tier: {call} fails here ({os.strerror(error.errno or 0)}), so there is no memory that ranks "
        "can share safely; allow memfd_create and F_ADD_SEALS in the container's seccomp profile, or "
        "configure no tiers"
    )
