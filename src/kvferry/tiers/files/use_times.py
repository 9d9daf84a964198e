"""Times of last use of chunk files, kept as their modification times. Eviction is in their order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress

from kvferry.tiers.files.regular_file import check_folders

# A repeated use within this time is not recorded, because on a shared mount each record is a message.
_USE_SECONDS = 10.0
# The present time divided by this lies in the first weeks of 1970. Cold files keep their order, and are
# evicted before all others.
_COLD_DIVISOR = 1000
# An earlier time, in nanoseconds since 1970, is that of a cold file.
FIRST_USE_NS = 365 * 86_400 * 10**9
# Difference between the times of two files that were used together, so that their order is recorded.
_APART_NS = 1000


def set_cold(fd: int, clock: Callable[[], float]) -> None:
    """Set the modification time of a file so that it is evicted before all files with a time of use."""
    cold = int(clock() * 1e9) // _COLD_DIVISOR
    # Without this time, the file is evicted like others.
    with suppress(OSError):
        os.utime(fd, ns=(cold, cold))


def mark_files_used(root: str, paths: Iterable[str], clock: Callable[[], float]) -> None:
    """Set the times of last use of files to about now, in the order of `paths`. Skip files that fail.

    Args:
        paths: paths of files below `root`, in the order in which they should be evicted.
        clock: seconds since 1970.
    """
    latest = 0
    for path in paths:
        with suppress(OSError):
            latest = _mark_used(root, path, latest, int(clock() * 1e9))


def _mark_used(root: str, path: str, latest: int, now: int) -> int:
    """Set a file's time of last use to `now`, or just after `latest` if that is later. All are nanoseconds.

    Returns:
        The latest time of all files so far.
    """
    check_folders(root, path)
    last = os.lstat(path).st_mtime_ns
    # A time far in the future comes from a wrong clock. Replace it, or the next files would need later times.
    # Each write is a message on a shared mount: skip it if the order is right and the time recent.
    if last <= latest or abs(now - last) >= _USE_SECONDS * 1e9:
        last = max(now, latest + _APART_NS)
        os.utime(path, ns=(last, last), follow_symlinks=False)
    return max(last, latest)
