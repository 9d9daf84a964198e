"""Parser of sizes such as "1.5GiB"."""

from __future__ import annotations

import re
from fractions import Fraction

from kvferry.errors import ConfigError

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40, "pib": 1 << 50}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "pb": 10**15}
_SIZE = re.compile(r"\s*(\d{1,1000}(?:\.\d{1,1000})?)\s*([A-Za-z]*)\s*")
# Largest size of a file on Linux, in bytes.
_LARGEST = (1 << 63) - 1
# Smallest number of bytes that needs no unit. A smaller one, such as 64, is meant as GiB.
_LEAST_WITHOUT_UNIT = 1 << 20


def check_capacity(where: str, capacity: int | str | None) -> None:
    """Check the configured capacity of a tier, which `where` names. None means the default, and is valid.

    Raises:
        ConfigError: the capacity is not a size, or not above 0, or larger than a file can be.
    """
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
        ConfigError: the text is not a number with a known unit, or a number without a unit is so small that
            another unit is meant.
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
