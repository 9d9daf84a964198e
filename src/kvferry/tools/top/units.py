"""Format numbers in short forms."""

from __future__ import annotations

_STEPS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
_EXACT = 10_000


def number(value: float | None) -> str:
    """Format a count or a rate: ``0``, ``0.4``, ``123``, ``9,876``, ``12.3k``; a dash for None.

    >>> [number(each) for each in (None, 0, 0.04, 3.14, 123.4, 9876, 12345, 2.5e6)]
    ['-', '0', '0.04', '3.1', '123', '9,876', '12.3k', '2.5M']
    """
    if value is None:
        return "-"
    if value >= _EXACT:
        each, unit = next((each, unit) for each, unit in _STEPS if value >= each)
        return f"{value / each:.1f}{unit}"
    # Rates of a few per second need a decimal, and counts have none.
    if value >= 100 or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 0.1 else f"{value:.2g}"


def percent(share: float | None) -> str:
    """Format a share from 0 to 1 as a percentage such as ``97%``; a dash for None."""
    return "-" if share is None else f"{share:.0%}"
