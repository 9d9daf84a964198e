"""Names of tiers, and of the sources that KV can be loaded from, for messages, metrics and settings.

The first tier of a kind has the name of its kind, such as ``file``. Further ones are numbered: ``file.2``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from threading import Lock

PEER = "peer"  # other engines, as a tier and as a source of KV
HOST = "host"
FLEET = "fleet"  # host memory of other engines
TIERS = "tiers"  # the source that loads from an engine's own tiers


class Medium(Enum):
    """The kind of storage that KV was loaded from, for engines that report loaded tokens by medium."""

    PEER = auto()
    HOST = auto()
    DISK = auto()
    NETWORK = auto()  # a store on other machines


def tier_name(kind: str, earlier: int) -> str:
    """Return the name of a tier that follows `earlier` tiers of its kind.

    >>> tier_name("file", 0), tier_name("file", 1)
    ('file', 'file.2')
    """
    return f"{kind}.{earlier + 1}" if earlier else kind


def tier_kind(name: str) -> str:
    """Return the kind of the tier with a given name.

    >>> tier_kind("file"), tier_kind("file.2")
    ('file', 'file')
    """
    return name.partition(".")[0]


class PutOutcome(StrEnum):
    """The outcome of storing a chunk. After all but `STORED` and `PRESENT`, the chunk is *dropped*."""

    STORED = "stored"
    PRESENT = "present"  # the tier had it already
    TOO_LARGE = "larger than the capacity"
    FULL = "nothing left to evict"
    NO_SPACE = "no space on the device"
    BUSY = "ledger held by others"
    OVER_BUDGET = "write budget used up"
    IO_ERROR = "I/O error"

    @property
    def dropped(self) -> bool:
        return self not in (PutOutcome.STORED, PutOutcome.PRESENT)


class GetOutcome(StrEnum):
    """The outcome of fetching a chunk. All outcomes except `HIT` are misses."""

    HIT = "hit"
    ABSENT = "absent"
    CORRUPT = "corrupt"  # moved to quarantine
    OTHER_SHAPE = "other shape"  # a good chunk, but not of the requested group
    OTHER_KEY = "other key"  # encrypted with a key that this engine does not have
    IO_ERROR = "I/O error"
    BUSY = "busy"  # the tier has it, but refuses to send more for a moment
    LATE = "late"  # it did not arrive in time, and may still arrive


@dataclass(frozen=True, slots=True)
class TierStats:
    """The counts of one storage tier in one process, since the process opened the tier."""

    # Numbers of attempts to store and to fetch a chunk, by outcome.
    puts: dict[PutOutcome, int]
    gets: dict[GetOutcome, int]
    stored_bytes: int  # bytes of the stored files, including headers and padding
    evicted: int  # number of files that this process evicted to make room
    evicted_bytes: int
    quarantined: int  # number of bad chunks moved to quarantine
    swept: int  # number of removed temporary files of dead writers

    @property
    def dropped(self) -> dict[PutOutcome, int]:
        return {reason: count for reason, count in self.puts.items() if reason.dropped}

    @property
    def misses(self) -> dict[GetOutcome, int]:
        return {reason: count for reason, count in self.gets.items() if reason is not GetOutcome.HIT}


@dataclass
class OutcomeCounter:
    """A thread-safe counter of everything that `TierStats` reports."""

    _puts: Counter[PutOutcome] = field(default_factory=Counter)
    _gets: Counter[GetOutcome] = field(default_factory=Counter)
    _sums: Counter[str] = field(default_factory=Counter)
    _lock: Lock = field(default_factory=Lock)

    def count_put(self, what: PutOutcome, stored_bytes: int) -> bool:
        """Count a store of a file of `stored_bytes`. Return whether to log it: the first of its outcome."""
        with self._lock:
            self._puts[what] += 1
            self._sums["stored_bytes"] += stored_bytes if what is PutOutcome.STORED else 0
            return self._puts[what] == 1

    def count_get(self, what: GetOutcome) -> bool:
        with self._lock:
            self._gets[what] += 1
            return self._gets[what] == 1

    def add(self, **counts: int) -> None:
        """Add to integer fields of `TierStats`, for example ``add(evicted=1)``."""
        with self._lock:
            self._sums.update(counts)

    def stats(self) -> TierStats:
        names = ("stored_bytes", "evicted", "evicted_bytes", "quarantined", "swept")
        with self._lock:
            return TierStats(dict(self._puts), dict(self._gets), **{name: self._sums[name] for name in names})
