"""The free room of a file system, and what it lacks if it refuses a file."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from kvferry.common.units import format_bytes

# The share of a file system's inodes that stays free for other programs is one divided by this.
_SPARE_FILES = 20

# EMLINK: a folder has as many entries as it may have. Project quotas of XFS report ENOSPC.
OUT_OF_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EMLINK)


@dataclass(frozen=True, slots=True)
class DiskRoom:
    """The free bytes and inodes of a file system, or of the project quota that a directory has."""

    free: int
    free_files: int | None  # None if the file system does not count inodes
    files: int | None = None  # free inodes and those in use, likewise

    @classmethod
    def of(cls, path: str) -> DiskRoom:
        found = os.statvfs(path)
        free = found.f_bavail * found.f_frsize
        return cls(free, found.f_favail, found.f_files) if found.f_files else cls(free, None)

    @property
    def lacks_files(self) -> bool:
        """Whether so few inodes are free that other programs would soon have none."""
        return self.free_files is not None and self.free_files * _SPARE_FILES < (self.files or 0)


def shortage(path: str, error: OSError, size: int = 4096) -> tuple[str, str]:
    """Return what a full file system lacked for `size` bytes at an `OUT_OF_ROOM` error, and advice."""
    try:
        room = DiskRoom.of(path)
    except OSError:
        return str(error), "free space"
    free = format_bytes(room.free)
    if room.free_files == 0:
        return (
            f"no inode is free, but {free} are",
            "remove files there, or use a file system with more inodes",
        )
    if error.errno == errno.EDQUOT:
        return f"a quota is used up, {free} are free", "raise the quota or remove files"
    if room.free < size:
        return f"{free} are free", "free space or lower the capacity"
    return (
        f"{free} are free, but a quota or the number of files in a folder is used up",
        "raise the quota, or lower the capacity",
    )
