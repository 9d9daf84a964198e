"""Who besides this user can change what lies in a directory."""

from __future__ import annotations

import os
import stat

_WRITABLE = stat.S_IWGRP | stat.S_IWOTH


def writable_by_others(root: str) -> str:
    """Why others could put chunks into a directory; empty if only this user and root can.

    Chunks carry checksums and no signature, so whoever can write there, or can replace a folder above,
    decides what engines compute with.

    Raises:
        OSError: it cannot be looked at.
    """
    path = os.path.realpath(root)
    while True:
        status = os.stat(path)
        if status.st_uid not in (0, os.geteuid()):
            return f"{path} belongs to user {status.st_uid}"
        # In a folder with the sticky bit, such as /tmp, others add entries, but replace none of ours.
        if status.st_mode & _WRITABLE and (
            path == os.path.realpath(root) or not status.st_mode & stat.S_ISVTX
        ):
            return f"{path} has mode {stat.S_IMODE(status.st_mode):o}, so others can write there"
        if path == os.path.dirname(path):
            return ""
        path = os.path.dirname(path)
