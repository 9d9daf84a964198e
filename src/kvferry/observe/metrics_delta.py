"""Metric values collected since the last step, to be sent from an engine to its `/metrics`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Series: TypeAlias = tuple[str, tuple[str, ...]]
"""Name of a metric (`metrics.METRICS`), and the values of its labels."""


@dataclass(slots=True)
class MetricsDelta:
    """Increments and values of metrics, keyed by series. Mutable.

    Attributes:
        counters: increments.
        gauges: current values.
        samples: observations of histograms.
    """

    counters: Counter[Series] = field(default_factory=Counter)
    gauges: dict[Series, float] = field(default_factory=dict)
    samples: defaultdict[Series, list[float]] = field(default_factory=lambda: defaultdict(list))

    def __bool__(self) -> bool:
        """Return whether it holds any value."""
        return bool(self.counters or self.gauges or self.samples)

    def count(self, name: str, *labels: str, by: int = 1) -> None:
        """Add `by` to a counter."""
        if by:
            self.counters[name, labels] += by

    def set(self, name: str, *labels: str, to: float) -> None:
        """Set a gauge."""
        self.gauges[name, labels] = to

    def sample(self, name: str, *labels: str, of: Iterable[float]) -> None:
        """Add observations to a histogram."""
        if seen := list(of):
            self.samples[name, labels] += seen

    def add(self, other: MetricsDelta) -> None:
        """Add a later delta: sum counters, overwrite gauges, append samples."""
        self.counters.update(other.counters)
        self.gauges.update(other.gauges)
        for series, seen in other.samples.items():
            self.samples[series] += seen

    def plain(self) -> dict[str, Any]:
        """Return lists of (name, labels, value) by kind, which any encoding can carry."""
        return {
            "counters": [[name, list(labels), n] for (name, labels), n in self.counters.items()],
            "gauges": [[name, list(labels), n] for (name, labels), n in self.gauges.items()],
            "samples": [[name, list(labels), seen] for (name, labels), seen in self.samples.items()],
        }

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> MetricsDelta:
        """Return the delta that `plain` described."""
        found = cls()
        for name, labels, n in plain["counters"]:
            found.count(name, *labels, by=n)
        for name, labels, n in plain["gauges"]:
            found.set(name, *labels, to=n)
        for name, labels, seen in plain["samples"]:
            found.sample(name, *labels, of=seen)
        return found
