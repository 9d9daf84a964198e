"""Counters of the host tier."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum


class HostDropReason(StrEnum):
    """The reason why the host tier did not store a chunk; a dropped chunk is counted under its reason."""

    PRESENT = "present"
    """The tier has the chunk already, or its slot is being filled."""
    NO_ROOM = "no room"
    """No slot is free: the remaining chunks are in use, or too many would have to be evicted."""
    FAILED = "failed"
    """The chunk's bytes could not be written."""
    CLEARED = "cleared"
    """The tier was cleared while the chunk was being filled."""


class HostMissReason(StrEnum):
    """The reason why the host tier did not have a requested chunk; a miss is counted under its reason."""

    ABSENT = "absent"
    """The chunk was not in the tier recently."""
    EVICTED = "evicted"
    """The chunk was evicted recently. A larger capacity could have kept the chunk."""
    FILLING = "filling"
    """The chunk's bytes are still being written."""


@dataclass(slots=True)
class HostCounters:
    """The counts of a host tier since its start.

    Attributes:
        stored, stored_bytes: number and bytes of chunks that were stored and became readable.
        dropped: number of chunks that were not stored, by reason.
        hits: number of chunks opened for reading.
        misses: number of requested chunks that the tier did not have, by reason.
        evicted, evicted_bytes: number and bytes of chunks that were evicted to make room.
    """

    stored: int = 0
    stored_bytes: int = 0
    dropped: Counter[HostDropReason] = field(default_factory=Counter)
    hits: int = 0
    misses: Counter[HostMissReason] = field(default_factory=Counter)
    evicted: int = 0
    evicted_bytes: int = 0
