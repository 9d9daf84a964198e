"""Numbers as people read them, four digits at most."""

from __future__ import annotations

_STEP = 1024
_ENOUGH_DIGITS = 100
_SECOND_MS = 1000


def size(count: float) -> str:
    """Bytes, as in ``640 B``, ``1.5 KiB``, ``12 MiB``."""
    if count < _STEP:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= _STEP
        if count < _STEP:
            break
    return f"{count:.0f} {unit}" if count >= _ENOUGH_DIGITS else f"{count:.1f} {unit}"


def milliseconds(seconds: float) -> str:
    """A duration, as in ``0.42 ms``, ``18 ms``, ``2.1 s``."""
    value = seconds * _SECOND_MS
    if value >= _SECOND_MS:
        return f"{seconds:.1f} s"
    return f"{value:.0f} ms" if value >= 10 else f"{value:.2f} ms"
