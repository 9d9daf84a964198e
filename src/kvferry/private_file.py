"""Create files that only their owner can read, whatever the umask is. Log files reveal clients' requests."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvferry.errors import ConfigError

# Permissions of a file's owner.
_OWNERS = 0o700


def open_private(path: str, flags: int) -> int:
    """Open a file, and if it is new, give it mode 0600: an `opener` for `open`."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def check_umask(status: str | None = None) -> None:
    """Raise ConfigError if the umask takes the owner's permissions from the files that this process creates.

    `status` is text in the format of ``/proc/self/status``; None to read that file.
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
