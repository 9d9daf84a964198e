"""Counts and transfer times of a tiered cache. Each tier has counts of its own in addition."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvferry.tiers.outcome import GetOutcome


@dataclass(slots=True)
class CacheCounts:
    """Counts of chunks of a tiered cache since its start."""

    # Chunks that ranks have copied, or failed to copy, to host memory.
    stored: int = 0
    failed: int = 0
    # Chunks made ready for a load, by name of the tier that they came from.
    fetched: Counter[str] = field(default_factory=Counter)
    # Reads that did not return the chunk although the tier listed it, by name of the tier and outcome.
    missed: Counter[tuple[str, GetOutcome]] = field(default_factory=Counter)


@dataclass(slots=True)
class TransferTimes:
    """Seconds that each successful read and write took, by name of the tier."""

    reads: dict[str, list[float]] = field(default_factory=dict)
    writes: dict[str, list[float]] = field(default_factory=dict)
