"""Counts and transfer times of a tiered cache. Each tier has counts of its own in addition."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvferry.tiers.outcome import GetOutcome


@dataclass(slots=True)
class CacheCounts:
    """Counts of chunks that a tiered cache has stored and fetched since its start.

    Attributes:
        stored: number of chunks that ranks have copied to host memory.
        failed: number of chunks that ranks failed to copy to host memory.
        fetched: number of chunks made ready for a load, by name of the tier that they came from.
        missed: number of reads that did not return the chunk although the tier's index of keys listed it, by
            name of the tier and outcome.
    """

    stored: int = 0
    failed: int = 0
    fetched: Counter[str] = field(default_factory=Counter)
    missed: Counter[tuple[str, GetOutcome]] = field(default_factory=Counter)


@dataclass(slots=True)
class TransferTimes:
    """Durations of successful chunk transfers between host memory and storage tiers.

    Attributes:
        reads: list with the seconds that each read took, by name of the tier.
        writes: list with the seconds that each write took, by name of the tier.
    """

    reads: dict[str, list[float]] = field(default_factory=dict)
    writes: dict[str, list[float]] = field(default_factory=dict)
