"""What was counted between two looks, by metric and labels, on its way from an engine to its `/metrics`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Series: TypeAlias = tuple[str, tuple[str, ...]]
"""Name of a metric (`metrics.METRICS`), and the values of its labels."""


@dataclass(slots=True)
class MetricsDelta:
    """Values of series. Only grows, until somebody takes it and begins a new one.

    Attributes:
        counters: how much more.
        gauges: how much now.
        samples: of histograms, one by one.
    """

    counters: Counter[Series] = field(default_factory=Counter)
    gauges: dict[Series, float] = field(default_factory=dict)
    samples: defaultdict[Series, list[float]] = field(default_factory=lambda: defaultdict(list))

    def __bool__(self) -> bool:
        """Something was counted."""
        return bool(self.counters or self.gauges or self.samples)

    def count(self, name: str, *labels: str, by: int = 1) -> None:
        """So much more, which is nothing if it is 0."""
        if by:
            self.counters[name, labels] += by

    def set(self, name: str, *labels: str, to: float) -> None:
        """It is so much now."""
        self.gauges[name, labels] = to

    def sample(self, name: str, *labels: str, of: Iterable[float]) -> None:
        """These were seen."""
        if seen := list(of):
            self.samples[name, labels] += seen

    def add(self, other: MetricsDelta) -> None:
        """What was counted after this."""
        self.counters.update(other.counters)
        self.gauges.update(other.gauges)
        for series, seen in other.samples.items():
            self.samples[series] += seen

    def plain(self) -> dict[str, Any]:
        """As values that any encoding knows: per kind, a list of (name, labels, value)."""
        return {
            "counters": [[name, list(labels), n] for (name, labels), n in self.counters.items()],
            "gauges": [[name, list(labels), n] for (name, labels), n in self.gauges.items()],
            "samples": [[name, list(labels), seen] for (name, labels), seen in self.samples.items()],
        }

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> MetricsDelta:
        """The other way round."""
        found = cls()
        for name, labels, n in plain["counters"]:
            found.count(name, *labels, by=n)
        for name, labels, n in plain["gauges"]:
            found.set(name, *labels, to=n)
        for name, labels, seen in plain["samples"]:
            found.sample(name, *labels, of=seen)
        return found
