"""Format bytes, counts and times as short text for people, with three or four digits, and read counts."""

from __future__ import annotations

import re
from fractions import Fraction

_COUNT = re.compile(r"(\d{1,18})((?:\.\d{1,18})?)([kKmMgGtT]?)")
_BINARY = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_AGES = (("days", 86_400, 0), ("h", 3600, 1), ("min", 60, 0))
_LARGEST_EXACT = 100_000
_LARGEST_WITH_DIGITS = 100
# Below this, milliseconds with three digits do not round to 1000.
_ROUNDS_TO_A_SECOND = 0.9995


def format_bytes(count: float) -> str:
    """Format a number of bytes in binary units. Values below 100 that are not whole get two decimals.

    >>> format_bytes(640), format_bytes(1536), format_bytes(2 << 20)
    ('640 B', '1.50 KiB', '2 MiB')
    """
    for unit, size in _BINARY:
        if count >= size:
            value = count / size
            whole = value >= _LARGEST_WITH_DIGITS or value.is_integer()
            return f"{value:.0f} {unit}" if whole else f"{value:.2f} {unit}"
    return f"{count:.0f} B"


def format_count(number: int) -> str:
    """Format a count: exactly below 100,000, otherwise in thousands (k) or millions (M).

    >>> format_count(8192), format_count(262_144), format_count(1_048_576)
    ('8,192', '262 k', '1.05 M')
    """
    if number < _LARGEST_EXACT:
        return f"{number:,}"
    return f"{number / 1e3:.0f} k" if number < 1e6 else f"{number / 1e6:.2f} M"


def parse_count(text: str) -> int:
    """Return the count that a text names, as vLLM reads its ``--max-model-len``: ``32k`` and ``32K`` too.

    >>> parse_count("32768"), parse_count("32k"), parse_count("32K"), parse_count("1.5m")
    (32768, 32000, 32768, 1500000)

    Raises:
        ValueError: the text is no count. The message says what to give.
    """
    found = _COUNT.fullmatch(text.strip())
    if found is None or (found[2] and not found[3].islower()):
        raise ValueError("give a whole number, such as 32768, 32k (32,000) or 32K (32,768)")
    base = 1024 if found[3].isupper() else 1000
    power = "kmgt".index(found[3].lower()) + 1 if found[3] else 0
    return int(Fraction(found[1] + found[2]) * base**power)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1.

    >>> counted(1, "chunk"), counted(2048, "chunk")
    ('1 chunk', '2,048 chunks')
    """
    return f"{number:,} {plural(number, noun)}"


def plural(number: float, noun: str) -> str:
    """Return a noun as it stands after a number that is formatted in another way than by `counted`."""
    return noun if number == 1 else f"{noun}s"


def format_seconds(seconds: float) -> str:
    """Format a duration as microseconds, milliseconds or seconds.

    >>> format_seconds(42e-6), format_seconds(0.00965), format_seconds(1.2)
    ('42 µs', '9.65 ms', '1.2 s')
    """
    if seconds >= _ROUNDS_TO_A_SECOND:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def format_age(seconds: float) -> str:
    """Format a duration in the largest unit (s, min, h or days) of which it has at least two.

    >>> [format_age(each) for each in (-0.5, 119, 120, 7200, 9000, 172_800, 345_600)]
    ['0 s', '119 s', '2 min', '2.0 h', '2.5 h', '2 days', '4 days']
    """
    for unit, size, digits in _AGES:
        if seconds >= 2 * size:
            return f"{seconds / size:.{digits}f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
