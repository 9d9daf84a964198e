"""Times of last use of chunk files, kept as their modification times. Eviction is in their order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress

from kvferry.tiers.files.regular_file import check_folders

# A repeated use within this time is not recorded, because on a shared mount each record is a message.
_USE_SECONDS = 10.0
# Divisor of the present time that gives the time of a cold file.
_COLD_DIVISOR = 1000
FIRST_USE_NS = 365 * 86_400 * 10**9
"""Earliest time of use, in nanoseconds since 1970. An earlier time is that of a cold file."""

# Difference between the times of two files that were used together, so that their order is recorded.
_APART_NS = 1000


def set_cold(fd: int, clock: Callable[[], float]) -> None:
    """Set the modification time of a file so that it is evicted before all files with a time of use.

    The times of cold files lie in the first weeks of 1970. Those of earlier cold files are earlier. If the
    time cannot be set, the file is evicted like others.

    Args:
        fd: descriptor of the file.
        clock: function that returns seconds since 1970.
    """
    cold = int(clock() * 1e9) // _COLD_DIVISOR
    with suppress(OSError):
        os.utime(fd, ns=(cold, cold))


def mark_files_used(root: str, paths: Iterable[str], clock: Callable[[], float]) -> None:
    """Set the modification times (times of last use) of files to about now, in the order of `paths`.

    To save writes on a shared mount, a file is not changed if its time is within 10 s of now and later than
    the times of the previous files. Files whose time cannot be read or set, for example missing files, are
    skipped.

    Args:
        root: directory of the tier.
        paths: paths of files below `root`, in the order in which they should be evicted.
        clock: function that returns seconds since 1970.
    """
    latest = 0
    for path in paths:
        with suppress(OSError):
            latest = _mark_used(root, path, latest, int(clock() * 1e9))


def _mark_used(root: str, path: str, latest: int, now: int) -> int:
    """Set the modification time (time of last use) of a file to now, or just after `latest` if that is later.

    If the file's time is within 10 s of now and later than `latest`, the file is not changed.

    Args:
        root: directory of the tier.
        path: path of the file.
        latest: latest time of the previous files, in nanoseconds since 1970; 0 for the first file.
        now: current time, in nanoseconds since 1970.

    Returns:
        The latest time of all files so far, in nanoseconds since 1970.
    """
    check_folders(root, path)
    last = os.lstat(path).st_mtime_ns
    # A time far in the future comes from a wrong clock. Replace it, or the next files would need later times.
    if last <= latest or abs(now - last) >= _USE_SECONDS * 1e9:
        last = max(now, latest + _APART_NS)
        os.utime(path, ns=(last, last), follow_symlinks=False)
    return max(last, latest)
