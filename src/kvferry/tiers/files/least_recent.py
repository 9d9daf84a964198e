"""Which files were used longest ago, of a directory of any size.

Of a million files not all are listed: their names would take a lot of memory, and most would be used or gone
before their turn. Nor does any step keep an engine's thread waiting: what is sorted is numbers, by numpy,
which lets other threads run.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

MAX_LISTED = 1 << 15
"""So many are listed; then the directory is walked again."""


def least_recently_used(
    files: Iterable[tuple[int, str]], most: int = MAX_LISTED
) -> tuple[list[tuple[int, str]], bool]:
    """The files used longest ago.

    >>> least_recently_used([(30, "c"), (10, "a"), (20, "b")], most=2)
    ([(10, 'a'), (20, 'b')], True)

    Args:
        files: when each was last used, in nanoseconds, and its path.
        most: list no more.

    Returns:
        The same, in order, and whether there were more.
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
    used = np.fromiter((used_ns for used_ns, _ in files), np.int64, len(files))
    return [files[at] for at in np.argsort(used, kind="stable")[:most]]
