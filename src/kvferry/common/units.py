"""Format bytes, counts and times as short text for people, with three or four digits, and read counts."""

from __future__ import annotations

import re
from fractions import Fraction

from kvferry.common.errors import ConfigError

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


_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40, "pib": 1 << 50}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "pb": 10**15}
_SIZE = re.compile(r"\s*(\d{1,1000}(?:\.\d{1,1000})?)\s*([A-Za-z]*)\s*")
# Largest size of a file on Linux, in bytes.
_LARGEST = (1 << 63) - 1
# Smallest number of bytes that needs no unit. A smaller one, such as 64, is meant as GiB.
_LEAST_WITHOUT_UNIT = 1 << 20


def check_capacity(where: str, capacity: int | str | None) -> None:
    """Raise ConfigError unless a tier's capacity is a size above 0 that a file can have, or None."""
    if capacity is None:
        return
    size = parse_size(capacity)
    if size <= 0:
        raise ConfigError(f"{where}: capacity is {capacity!r}, it must be above 0")
    if size > _LARGEST:
        raise ConfigError(f"{where}: capacity is larger than 8 EiB, the largest size of a file; lower it")


def parse_size(size: int | str) -> int:
    """Convert a number of bytes, or a text with a unit, to a number of bytes.

    >>> parse_size("1.5GiB"), parse_size("20 MB"), parse_size(1 << 30)
    (1610612736, 20000000, 1073741824)

    Raises:
        ConfigError: the text is no size, or a number without a unit is so small that another unit is meant.
    """
    found = _SIZE.fullmatch(str(size))
    if found is None or found[2].lower() not in _UNITS:
        raise ConfigError(
            f"{size!r} is not a size; write a number of bytes, or one with KiB, MiB, GiB, TiB or PiB"
        )
    # A fraction, because a float would round a large size to another number of bytes.
    size_bytes = Fraction(found[1]) * _UNITS[found[2].lower()]
    if not found[2] and 0 < size_bytes < _LEAST_WITHOUT_UNIT:
        raise ConfigError(
            f"the size {found[1]} has no unit, so it is in bytes; write {found[1]}GiB or {found[1]}B"
        )
    return int(size_bytes)
