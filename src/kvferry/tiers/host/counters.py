"""What a host tier has done, for whoever asks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum


class HostDropReason(StrEnum):
    """Why a chunk was not stored."""

    PRESENT = "present"
    """It is here, or is being filled."""
    NO_ROOM = "no room"
    """Everything that could leave for it is held, or more than is sensible would have to."""
    FAILED = "failed"
    """It was not filled."""
    CLEARED = "cleared"
    """All was forgotten while it was being filled."""


class HostMissReason(StrEnum):
    """Why a chunk was not read."""

    ABSENT = "absent"
    """It was never here, or so long ago that it is not remembered."""
    EVICTED = "evicted"
    """It was here lately: with a larger capacity it still were."""
    FILLING = "filling"
    """It is being filled."""


@dataclass(slots=True)
class HostCounters:
    """Counts since the start; bytes are of slots.

    Attributes:
        stored, stored_bytes: chunks that became readable.
        dropped: chunks that did not, by reason.
        hits, hit_bytes: chunks opened for reading.
        misses: chunks asked for that were not, by reason.
        evicted, evicted_bytes: chunks that made room for others.
    """

    stored: int = 0
    stored_bytes: int = 0
    dropped: Counter[HostDropReason] = field(default_factory=Counter)
    hits: int = 0
    hit_bytes: int = 0
    misses: Counter[HostMissReason] = field(default_factory=Counter)
    evicted: int = 0
    evicted_bytes: int = 0
