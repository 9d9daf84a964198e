"""Counters of the host tier."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum


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
