"""Times of last use, kept as modification times of files. A directory evicts by them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress

from kvferry.tiers.files.regular_file import check_folders

# A later use within this time is not recorded: on a shared mount each record is a message.
_USE_SECONDS = 10.0
# Between files that were used one after the other, so that they have an order.
_APART_NS = 1000


def mark_files_used(root: str, paths: Iterable[str], clock: Callable[[], float]) -> None:
    """Set the modification times of files to now, each later than that of the file before it.

    A recent time is kept, unless the file would then seem older than the file before it. Files that are
    missing or read-only are skipped.

    Args:
        root: the directory of the tier.
        paths: paths of files below `root`, the first to be evicted first.
        clock: seconds since 1970.
    """
    latest = 0
    for path in paths:
        with suppress(OSError):
            latest = _mark_used(root, path, latest, int(clock() * 1e9))


def _mark_used(root: str, path: str, latest: int, now: int) -> int:
    """Record that a file was used after `latest`; return the later of both times, in nanoseconds."""
    check_folders(root, path)
    last = os.lstat(path).st_mtime_ns
    # A time far ahead comes from a machine whose clock is wrong, and files after it would need later ones.
    if last <= latest or abs(now - last) >= _USE_SECONDS * 1e9:
        last = max(now, latest + _APART_NS)
        os.utime(path, ns=(last, last), follow_symlinks=False)
    return max(last, latest)
