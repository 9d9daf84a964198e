"""Selection of the least recently used files in a directory of any size.

The number of selected files is limited. A million names would take a lot of memory, and most of these files
would be used or removed before they are evicted. numpy sorts the times, because it lets other threads run
meanwhile, such as an engine's.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

MAX_LISTED = 1 << 15
"""Maximum number of selected files. To evict more, the directory is walked again."""


def least_recently_used(
    files: Iterable[tuple[int, str]], most: int = MAX_LISTED
) -> tuple[list[tuple[int, str]], bool]:
    """Return the `most` least recently used files of a directory, without keeping all files in memory.

    >>> least_recently_used([(30, "c"), (10, "a"), (20, "b")], most=2)
    ([(10, 'a'), (20, 'b')], True)

    Args:
        files: time of last use, in nanoseconds, and path of each file.
        most: maximum number of files to return.

    Returns:
        The selected files, the least recently used first, and whether `files` has more files than these.
    """
    kept: list[tuple[int, str]] = []
    latest = None
    more = False
    for one in files:
        if latest is not None and one[0] >= latest:
            continue
        kept.append(one)
        if len(kept) > 2 * most:
            kept, more = _first(kept, most), True
            latest = kept[-1][0]
    return _first(kept, most), more or len(kept) > most


def _first(files: list[tuple[int, str]], most: int) -> list[tuple[int, str]]:
    """Return the `most` least recently used files, sorted by time of last use."""
    used = np.fromiter((used_ns for used_ns, _ in files), np.int64, len(files))
    return [files[at] for at in np.argsort(used, kind="stable")[:most]]
