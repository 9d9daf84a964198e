"""Eviction for a file system that is full although the capacity of a directory is not used up.

The capacity counts bytes. The file system may run out of something else first: inodes, a quota, entries in a
folder, or bytes, because other programs use them. It then refuses a new file, and the least recently used
files are evicted for the new one.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from kvferry.common.units import format_bytes
from kvferry.tiers.files.chunk_file import NotRegular, check_folders, make_folder
from kvferry.tiers.files.ledger import Ledger, LockTimeout
from kvferry.tiers.files.space import DirectorySpace
from kvferry.tiers.paths import chunk_identity, quarantine_name

# EMLINK: a folder has as many entries as it may have. Project quotas of XFS report ENOSPC.
OUT_OF_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EMLINK)

# Something else may hold what is used up: other programs, other users' files under a quota, a thin volume.
# Evicting for each store would then empty the directory for nothing.
_PAUSE_SECONDS = 60.0

_EVICTING = (
    "file tier %s: its file system is full before the capacity is used up: %s. The least recently used "
    "chunks are evicted for new ones; %s"
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DiskRoom:
    """The free bytes and inodes of a file system, or of the project quota that a directory has."""

    free: int
    free_files: int | None  # None if the file system does not count inodes

    @classmethod
    def of(cls, path: str) -> DiskRoom:
        """Return the free room of the file system that holds a path."""
        found = os.statvfs(path)
        return cls(found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None)


def shortage(path: str, error: OSError, size: int = 4096) -> tuple[str, str]:
    """Return what a full file system lacks, and advice for the operator.

    Args:
        error: error of a call that needed room there. Its errno is in `OUT_OF_ROOM`.
        size: bytes that the call, or the file that it was for, needed.
    """
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


class FullDisk:
    """Evicts files of a directory for new ones that its file system refuses. Any thread may use it."""

    def __init__(self, root: str, space: DirectorySpace, clock: Callable[[], float]) -> None:
        self._root, self._space, self._clock = root, space, clock
        self._paused_at: float | None = None
        self._logged = threading.Lock()  # taken by the thread that logs the first eviction, for good

    def make_way(self, error: OSError, tries: int, final: str, size: int) -> bool:
        """Evict files after a failure to store a file; return whether to try again.

        Args:
            tries: times that storing this file has failed, at least 1.
            final: path of the file that could not be stored.
            size: bytes of that file.

        Raises:
            LockTimeout: other threads or processes held the lock of the ledger for too long.
            OSError: the directory cannot be read.
        """
        if error.errno not in OUT_OF_ROOM or self._paused:
            return False
        # Before the eviction, which makes room.
        said = () if self._logged.locked() else shortage(self._root, error, size)
        # One file is enough if inodes or a quota of files ran out, and also for bytes if files are of one
        # size. A folder with as many files as it may have needs one of its own to go.
        for at_least, folder in ((1, ""), (1, os.path.dirname(final)), (size, ""))[tries - 1 :]:
            if self._space.evict(at_least, folder):
                if said and self._logged.acquire(blocking=False):
                    _log.warning(_EVICTING, self._root, *said)
                return True
        self._paused_at = self._clock()
        return False

    @property
    def _paused(self) -> bool:
        return self._paused_at is not None and abs(self._clock() - self._paused_at) < _PAUSE_SECONDS


def quarantine_file(root: str, ledger: Ledger, found: os.stat_result, path: str) -> bool:
    """Move a bad file to quarantine, where its bytes still count. Return whether it was moved.

    Args:
        ledger: its lock is held during the move.
        found: `os.stat` of the bad file. If `path` is now another file, nothing is moved.
    """
    with suppress(LockTimeout, OSError), ledger.held() as held_ledger:
        check_folders(root, path)
        if os.path.samestat(found, os.lstat(path)):
            aside = f"{root}/{quarantine_name(*chunk_identity(path))}"
            try:
                make_folder(root, os.path.dirname(aside))
                os.rename(path, aside)
            except OSError as error:
                if not isinstance(error, NotRegular) and error.errno not in OUT_OF_ROOM:
                    raise
                # It must not stay: no process stores a chunk anew while a file with its name exists.
                os.unlink(path)
                # Count instead of release: something planted was never charged.
                held_ledger.count()
            else:
                return True
    return False
