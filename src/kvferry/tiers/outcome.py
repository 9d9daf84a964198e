"""What became of a chunk that was to be kept or fetched, and how often."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from threading import Lock


class PutOutcome(StrEnum):
    """What became of a chunk that was to be kept. All but the first two are dropped stores."""

    STORED = "stored"
    PRESENT = "present"  # it was there already
    TOO_LARGE = "larger than the capacity"
    FULL = "nothing left to evict"
    NO_SPACE = "no space on the device"
    BUSY = "ledger held by others"
    IO_ERROR = "I/O error"

    @property
    def dropped(self) -> bool:
        """Whether the chunk is not there now."""
        return self not in (PutOutcome.STORED, PutOutcome.PRESENT)


class GetOutcome(StrEnum):
    """What became of a chunk that was wanted. All but the first are misses."""

    HIT = "hit"
    ABSENT = "absent"
    CORRUPT = "corrupt"  # it was moved aside
    OTHER_SHAPE = "other shape"  # a good chunk, but not of the group that was wanted
    IO_ERROR = "I/O error"


@dataclass(frozen=True, slots=True)
class TierStats:
    """What a process did with a tier since it was opened.

    Attributes:
        puts, gets: how many chunks became what.
        stored_bytes: of what was stored, as storage has it: header and padding included.
        hit_bytes: of chunks, in memory.
        evicted: chunks that had to go to make room.
        evicted_bytes: of these, as storage had them.
        quarantined: bad chunks that were moved aside.
        swept: leftovers of dead writers that were removed.
    """

    puts: dict[PutOutcome, int]
    gets: dict[GetOutcome, int]
    stored_bytes: int
    hit_bytes: int
    evicted: int
    evicted_bytes: int
    quarantined: int
    swept: int

    @property
    def dropped(self) -> dict[PutOutcome, int]:
        """Stores that were dropped, by reason."""
        return {reason: count for reason, count in self.puts.items() if reason.dropped}

    @property
    def misses(self) -> dict[GetOutcome, int]:
        """Chunks that were wanted and not had, by reason."""
        return {reason: count for reason, count in self.gets.items() if reason is not GetOutcome.HIT}


@dataclass
class OutcomeCounter:
    """Counts, from any thread, what `TierStats` says."""

    _puts: Counter[PutOutcome] = field(default_factory=Counter)
    _gets: Counter[GetOutcome] = field(default_factory=Counter)
    _sums: Counter[str] = field(default_factory=Counter)
    _lock: Lock = field(default_factory=Lock)

    def count_put(self, what: PutOutcome, stored_bytes: int) -> bool:
        """Count a store; says whether it is the first that became this."""
        with self._lock:
            self._puts[what] += 1
            self._sums["stored_bytes"] += stored_bytes if what is PutOutcome.STORED else 0
            return self._puts[what] == 1

    def count_get(self, what: GetOutcome, read_bytes: int) -> bool:
        """Count a fetch; says whether it is the first that became this."""
        with self._lock:
            self._gets[what] += 1
            self._sums["hit_bytes"] += read_bytes if what is GetOutcome.HIT else 0
            return self._gets[what] == 1

    def add(self, **counts: int) -> None:
        """Add to the sums that `TierStats` names."""
        with self._lock:
            self._sums.update(counts)

    def stats(self) -> TierStats:
        """What was counted so far."""
        names = ("stored_bytes", "hit_bytes", "evicted", "evicted_bytes", "quarantined", "swept")
        with self._lock:
            return TierStats(dict(self._puts), dict(self._gets), **{name: self._sums[name] for name in names})
