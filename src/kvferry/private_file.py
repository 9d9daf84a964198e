"""Files that only the user who runs an engine can read, whatever the umask: logs tell who asked for what."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvferry.errors import ConfigError

_OWNERS = 0o700
"""Rights of a file's owner."""


def open_private(path: str, flags: int) -> int:
    """Open a file, as `opener` of `open`; one that is made has mode 0600, one that exists keeps its own.

    Raises:
        OSError: it cannot be opened.
    """
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def check_umask(status: str | None = None) -> None:
    """Check that the user who makes a file may use it.

    Args:
        status: text of ``/proc/self/status``; by default this process's own.

    Raises:
        ConfigError: the umask takes rights from the owner of new files.
    """
    if status is None:
        try:
            status = Path("/proc/self/status").read_text()  # os.umask tells it only by changing it
        except OSError:
            return
    found = re.search(r"^Umask:\s+([0-7]+)$", status, re.MULTILINE)
    if found and int(found[1], 8) & _OWNERS:
        raise ConfigError(
            f"umask is {found[1]}, so engines could not use the files that they make; run umask 077 first"
        )
