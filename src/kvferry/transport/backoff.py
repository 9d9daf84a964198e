"""Back-off from a peer that has failed."""

from __future__ import annotations

_LONGEST_SECONDS = 60.0


def pause_seconds(failures: int) -> float:
    """Return the pause after a number of consecutive failures: 0, then 1, 2, 4, ... seconds, at most 60.

    >>> [pause_seconds(failures) for failures in (1, 2, 3, 4, 100)]
    [0.0, 1.0, 2.0, 4.0, 60.0]
    """
    return 0.0 if failures < 2 else min(2.0 ** min(failures - 2, 10), _LONGEST_SECONDS)
