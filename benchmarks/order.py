"""The order in which the alternatives of a round take turns."""

from __future__ import annotations

from collections.abc import Sequence


def rotated(names: Sequence[str], by: int) -> tuple[str, ...]:
    """Return the names in rotated order, so that over the rounds each of them comes first.

    >>> rotated(("a", "b", "c"), 4)
    ('b', 'c', 'a')
    """
    first = by % len(names)
    return (*names[first:], *names[:first])
