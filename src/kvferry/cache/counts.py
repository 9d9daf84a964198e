"""What a tiered cache has done, besides what each of its tiers counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvferry.tiers.outcome import GetOutcome


@dataclass(slots=True)
class CacheCounts:
    """See the module.

    Attributes:
        stored: chunks that ranks have filled.
        failed: chunks that they could not.
        fetched: chunks that loads took, by tier.
        missed: chunks that a tier should have had and did not give, by tier and reason.
        read_seconds, write_seconds: of chunks that slow tiers have given or taken, by tier; whoever looks
            takes them.
    """

    stored: int = 0
    failed: int = 0
    fetched: Counter[str] = field(default_factory=Counter)
    missed: Counter[tuple[str, GetOutcome]] = field(default_factory=Counter)
    read_seconds: dict[str, list[float]] = field(default_factory=dict)
    write_seconds: dict[str, list[float]] = field(default_factory=dict)
