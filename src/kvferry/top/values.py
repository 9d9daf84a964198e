"""Values of series, which can be added up and asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from kvferry.top.quantile import Bucket

Labels: TypeAlias = tuple[tuple[str, str], ...]
"""Names and values, sorted."""


@dataclass(frozen=True, slots=True)
class Values:
    """Of the series of one engine, or of several, added up: by name, then by labels.

    >>> hits = Values({"hits": {(("source", "peer"),): 3.0, (("source", "tiers"),): 2.0}})
    >>> hits.total("hits"), hits.total("hits", source="peer"), hits.by("hits", "source")
    (5.0, 3.0, {('peer',): 3.0, ('tiers',): 2.0})
    """

    of: Mapping[str, Mapping[Labels, float]] = field(default_factory=dict)

    def total(self, name: str, **where: str) -> float:
        """The sum over all series with these labels; 0 if there are none."""
        return sum(
            value for has, value in self.of.get(name, {}).items() if where.items() <= dict(has).items()
        )

    def by(self, name: str, *labels: str, **where: str) -> dict[tuple[str, ...], float]:
        """Sums by the values of some labels, in the order of these."""
        sums: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for has, value in self.of.get(name, {}).items():
            own = dict(has)
            if where.items() <= own.items():
                sums[tuple(own.get(label, "") for label in labels)] += value
        return dict(sorted(sums.items()))

    def buckets(self, name: str, **where: str) -> list[Bucket]:
        """Of a histogram, cumulative, by their upper ends."""
        return sorted(Bucket(float(le), n) for (le,), n in self.by(f"{name}_bucket", "le", **where).items())

    @classmethod
    def added(cls, several: Iterable[Values]) -> Values:
        """Series that are alike in name and labels, added up."""
        sums: defaultdict[str, defaultdict[Labels, float]] = defaultdict(lambda: defaultdict(float))
        for values in several:
            for name, series in values.of.items():
                for labels, value in series.items():
                    sums[name][labels] += value
        return cls(sums)
