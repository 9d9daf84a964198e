"""Checks that the arena fits into the available memory, without torch: `kvferry config` makes them too."""

from __future__ import annotations

from kvferry.errors import ConfigError
from kvferry.memory.available import available_memory
from kvferry.units import format_bytes


def check_available(size: int) -> None:
    """Check that this process can still allocate `size` bytes.

    Raises:
        ConfigError: the machine or a control group has less memory left, or /proc/meminfo cannot be read.
    """
    available, where = _available()
    if size > available:
        raise ConfigError(too_large(size, f"{format_bytes(available)} are {where}"))


def available_bytes() -> int:
    """Return how many bytes this process can still allocate on its machine and in its control groups.

    Raises:
        ConfigError: /proc/meminfo cannot be read.
    """
    return _available()[0]


def _available() -> tuple[int, str]:
    if (found := available_memory()) is None:
        raise ConfigError(
            "host tier: cannot read the available memory from /proc/meminfo; mount /proc, or configure "
            "no tiers"
        )
    return found


def too_large(size: int, found: str) -> str:
    """Return the message for an arena of `size` bytes that does not fit. `found` is the reason."""
    return f"host tier: {format_bytes(size)} of shared memory, but {found}; lower its capacity"
