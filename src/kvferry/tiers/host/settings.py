"""The settings of the host tier."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

import msgspec

from kvferry.common.errors import ConfigError
from kvferry.common.units import check_capacity, format_bytes
from kvferry.memory.shared_memory import available_memory
from kvferry.tiers.eviction import EVICTION_POLICIES
from kvferry.tiers.names import HOST


class HostSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the host tier, which keeps chunks in memory that the ranks of the engine share.

    Every chunk passes through this tier on its way to or from the other tiers.

    Attributes:
        capacity: size of the shared memory: a number of bytes, or a text such as ``4GiB``; None for a tenth
            of the available memory.
        eviction_policy: name of the policy that chooses the chunk to evict: ``lru``, ``arc``, ``s3fifo``
            or ``density``.
        load_weight: factor by which the source policy ``weight`` multiplies the number of tokens that this
            tier offers, to compare the sources of KV. Other source policies ignore it.
    """

    kind: ClassVar[str] = HOST

    capacity: int | str | None = None
    eviction_policy: str = "lru"
    load_weight: float = 1.0

    def check(self, where: str) -> None:
        """Raise ConfigError if a value is out of range. `where` names these settings in messages."""
        check_capacity(where, self.capacity)
        if self.eviction_policy not in EVICTION_POLICIES:
            raise ConfigError(
                f"{where} ({HOST}): eviction_policy is {self.eviction_policy!r}; it must be one of "
                f"{', '.join(EVICTION_POLICIES)}"
            )


def check_available(size: int) -> None:
    """Check that this process can still allocate `size` bytes, or raise ConfigError."""
    available, where = _available()
    if size > available:
        raise ConfigError(too_large(size, f"{format_bytes(available)} are {where}"))


def available_bytes() -> int:
    """Return how many bytes this process can still allocate, or raise ConfigError if that is unknown."""
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


class HostDropReason(StrEnum):
    """The reason why the host tier did not store a chunk."""

    PRESENT = "present"  # or its slot is being filled
    NO_ROOM = "no room"  # the remaining chunks are in use, or too many would have to be evicted
    FAILED = "failed"  # the chunk's bytes could not be written
    CLEARED = "cleared"  # while the chunk was being filled


class HostMissReason(StrEnum):
    """The reason why the host tier did not have a requested chunk."""

    ABSENT = "absent"  # not in the tier recently
    EVICTED = "evicted"  # recently: a larger capacity could have kept the chunk
    FILLING = "filling"  # the chunk's bytes are still being written


@dataclass(slots=True)
class HostCounters:
    """The counts of a host tier since its start; of dropped chunks and misses by reason."""

    stored: int = 0
    stored_bytes: int = 0
    dropped: Counter[HostDropReason] = field(default_factory=Counter)
    hits: int = 0
    misses: Counter[HostMissReason] = field(default_factory=Counter)
    evicted: int = 0
    evicted_bytes: int = 0
