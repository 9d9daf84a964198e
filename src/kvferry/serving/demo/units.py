"""Numbers as people read them, four digits at most."""

from __future__ import annotations

import math

_STEP = 1024
_UNITS = ("KiB", "MiB", "GiB")
_ENOUGH_DIGITS = 100
_ENOUGH_MS = 10


def size(count: float) -> str:
    """Bytes, as in ``640 B``, ``1.5 KiB``, ``12 MiB``."""
    if count < _STEP:
        return f"{count:.0f} B"
    exponent = min(int(math.log(count, _STEP)), len(_UNITS))
    value = count / _STEP**exponent
    digits = 0 if value >= _ENOUGH_DIGITS else 1
    return f"{value:.{digits}f} {_UNITS[exponent - 1]}"


def milliseconds(seconds: float) -> str:
    """A duration, as in ``0.42 ms``, ``18 ms``, ``2.1 s``."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    value = seconds * 1000
    return f"{value:.0f} ms" if value >= _ENOUGH_MS else f"{value:.2f} ms"
