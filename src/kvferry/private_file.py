"""Create files that only their owner can read, whatever the umask is. Log files reveal clients' requests."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvferry.errors import ConfigError

_OWNERS = 0o700
"""Permission bits of a file's owner: read, write and execute."""


def open_private(path: str, flags: int) -> int:
    """Open a file, and if it is new, give it mode 0600. Pass this function as the `opener` of `open`.

    Only the owner can then read or write the file. An existing file keeps its mode.

    Args:
        path: path of the file.
        flags: flags of `os.open`.

    Returns:
        File descriptor.

    Raises:
        OSError: the file cannot be opened.
    """
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def check_umask(status: str | None = None) -> None:
    """Check that the umask does not remove the owner's permissions from the files that this process creates.

    Args:
        status: text in the format of ``/proc/self/status``; None to read that file.

    Raises:
        ConfigError: the umask removes some of the owner's permissions.
    """
    if status is None:
        try:
            status = Path("/proc/self/status").read_text()  # os.umask cannot read without writing
        except OSError:
            return
    found = re.search(r"^Umask:\s+([0-7]+)$", status, re.MULTILINE)
    if found and int(found[1], 8) & _OWNERS:
        raise ConfigError(
            f"umask is {found[1]}, so engines could not use the files that they make; run umask 077 first"
        )
