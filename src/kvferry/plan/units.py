"""Numbers as people read them, in few characters."""

from __future__ import annotations

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_AGES = (("days", 86_400, 0), ("h", 3600, 1), ("min", 60, 0))
_EXACT = 100_000
_MANY = 100
_A_SECOND = 0.9995
"""In three digits, whatever is no less than this."""


def size(count: float) -> str:
    """Bytes, as in ``640 B``, ``1.5 KiB``, ``2 MiB``."""
    for unit, each in _UNITS:
        if count >= each:
            value = count / each
            return f"{value:.0f} {unit}" if value >= _MANY or value.is_integer() else f"{value:.2f} {unit}"
    return f"{count:.0f} B"


def amount(number: int) -> str:
    """A count, as in ``8,192``, ``262 k``, ``1.05 M``."""
    if number < _EXACT:
        return f"{number:,}"
    return f"{number / 1e3:.0f} k" if number < 1e6 else f"{number / 1e6:.2f} M"


def duration(seconds: float) -> str:
    """A time, as in ``42 µs``, ``9.65 ms``, ``1.2 s``."""
    if seconds >= _A_SECOND:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def age(seconds: float) -> str:
    """How long something has lasted, or how long ago it was.

    >>> [age(each) for each in (-0.5, 119, 120, 7200, 9000, 172_800, 345_600)]
    ['0 s', '119 s', '2 min', '2.0 h', '2.5 h', '2 days', '4 days']
    """
    for unit, each, digits in _AGES:
        if seconds >= 2 * each:
            return f"{seconds / each:.{digits}f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
