"""Counts and times of a tiered cache, in addition to the counts of its tiers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvferry.tiers.outcome import GetOutcome


@dataclass(slots=True)
class CacheCounts:
    """Numbers of chunks since the start.

    Attributes:
        stored: chunks that ranks have filled.
        failed: chunks that ranks could not fill.
        fetched: chunks that loads took, by tier.
        missed: chunks that a tier should have had but did not deliver, by tier and reason.
    """

    stored: int = 0
    failed: int = 0
    fetched: Counter[str] = field(default_factory=Counter)
    missed: Counter[tuple[str, GetOutcome]] = field(default_factory=Counter)


@dataclass(slots=True)
class TransferTimes:
    """The time of each chunk's transfer between host memory and a storage tier, by tier.

    Attributes:
        reads: seconds of each read.
        writes: seconds of each write.
    """

    reads: dict[str, list[float]] = field(default_factory=dict)
    writes: dict[str, list[float]] = field(default_factory=dict)
