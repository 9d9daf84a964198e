"""Files that only the user who runs an engine can read, whatever the umask: logs tell who asked for what."""

from __future__ import annotations

import os


def open_private(path: str, flags: int) -> int:
    """Open a file, as `opener` of `open`; one that is made has mode 0600, one that exists keeps its own.

    Raises:
        OSError: it cannot be opened.
    """
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
