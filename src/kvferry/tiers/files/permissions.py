"""A check for other users who can write to a directory."""

from __future__ import annotations

import os
import stat

_WRITABLE = stat.S_IWGRP | stat.S_IWOTH


def writable_by_others(root: str) -> str:
    """Return the reason why other users can write to a directory; empty if only this user and root can.

    Chunks have checksums but no signatures. So a user who can write to the directory, or can replace a folder
    above it, controls the KV that engines use.

    Raises:
        OSError: the status of a folder cannot be read.
    """
    path = os.path.realpath(root)
    while True:
        status = os.stat(path)
        if status.st_uid not in (0, os.geteuid()):
            return f"{path} belongs to user {status.st_uid}"
        # In a folder with the sticky bit, such as /tmp, others can add entries, but not replace ours.
        if status.st_mode & _WRITABLE and (
            path == os.path.realpath(root) or not status.st_mode & stat.S_ISVTX
        ):
            return f"{path} has mode {stat.S_IMODE(status.st_mode):o}, so others can write there"
        if path == os.path.dirname(path):
            return ""
        path = os.path.dirname(path)
