"""Outcomes of storing and fetching chunks, and how often each happened."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from threading import Lock


class PutOutcome(StrEnum):
    """The outcome of storing a chunk in a tier.

    After `STORED` and `PRESENT`, the tier has the chunk. After any other outcome, the chunk is *dropped*: the
    tier does not have it.
    """

    STORED = "stored"
    PRESENT = "present"  # the tier had it already
    TOO_LARGE = "larger than the capacity"
    FULL = "nothing left to evict"
    NO_SPACE = "no space on the device"
    BUSY = "ledger held by others"
    IO_ERROR = "I/O error"

    @property
    def dropped(self) -> bool:
        """Return whether the outcome means that the tier does not have the chunk."""
        return self not in (PutOutcome.STORED, PutOutcome.PRESENT)


class GetOutcome(StrEnum):
    """The outcome of fetching a chunk. All outcomes except `HIT` are misses."""

    HIT = "hit"
    ABSENT = "absent"
    CORRUPT = "corrupt"  # moved to quarantine
    OTHER_SHAPE = "other shape"  # a good chunk, but not of the requested group
    IO_ERROR = "I/O error"


@dataclass(frozen=True, slots=True)
class TierStats:
    """The counts of one storage tier in one process, since the process opened the tier.

    Attributes:
        puts, gets: numbers of attempts to store and to fetch a chunk, by outcome.
        stored_bytes: bytes of the stored files, including headers and padding.
        evicted: number of files that this process evicted to make room.
        evicted_bytes: bytes of the evicted files.
        quarantined: number of bad chunks moved to quarantine.
        swept: number of removed temporary files of dead writers.
    """

    puts: dict[PutOutcome, int]
    gets: dict[GetOutcome, int]
    stored_bytes: int
    evicted: int
    evicted_bytes: int
    quarantined: int
    swept: int

    @property
    def dropped(self) -> dict[PutOutcome, int]:
        """Number of chunks that were not stored, for each reason."""
        return {reason: count for reason, count in self.puts.items() if reason.dropped}

    @property
    def misses(self) -> dict[GetOutcome, int]:
        """Number of fetches that missed, for each reason."""
        return {reason: count for reason, count in self.gets.items() if reason is not GetOutcome.HIT}


@dataclass
class OutcomeCounter:
    """A thread-safe counter of everything that `TierStats` reports."""

    _puts: Counter[PutOutcome] = field(default_factory=Counter)
    _gets: Counter[GetOutcome] = field(default_factory=Counter)
    _sums: Counter[str] = field(default_factory=Counter)
    _lock: Lock = field(default_factory=Lock)

    def count_put(self, what: PutOutcome, stored_bytes: int) -> bool:
        """Count an attempt to store a chunk. Return whether this is the first attempt with this outcome.

        The caller uses the result to log each kind of failure only once.

        Args:
            what: outcome of the attempt.
            stored_bytes: size of the chunk file in bytes. It is added to `TierStats.stored_bytes` if the
                chunk was stored.
        """
        with self._lock:
            self._puts[what] += 1
            self._sums["stored_bytes"] += stored_bytes if what is PutOutcome.STORED else 0
            return self._puts[what] == 1

    def count_get(self, what: GetOutcome) -> bool:
        """Count an attempt to fetch a chunk. Return whether this is the first attempt with this outcome.

        The caller uses the result to log each kind of failure only once.
        """
        with self._lock:
            self._gets[what] += 1
            return self._gets[what] == 1

    def add(self, **counts: int) -> None:
        """Add to the counts of events other than puts and gets, for example ``add(evicted=1)``.

        Args:
            counts: numbers to add. Each argument has the name of an integer field of `TierStats`.
        """
        with self._lock:
            self._sums.update(counts)

    def stats(self) -> TierStats:
        """Return a copy of all counts."""
        names = ("stored_bytes", "evicted", "evicted_bytes", "quarantined", "swept")
        with self._lock:
            return TierStats(dict(self._puts), dict(self._gets), **{name: self._sums[name] for name in names})
