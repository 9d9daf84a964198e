"""Changes of metrics since the last engine step. The engine sends them to the process that has `/metrics`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Series: TypeAlias = tuple[str, tuple[str, ...]]
"""Key of a series: name of a metric in `metrics.METRICS`, and the values of its labels."""


@dataclass(slots=True)
class MetricsDelta:
    """Changes of metrics in one engine step, by series. Mutable.

    Attributes:
        counters: increments of the counters.
        gauges: current values of the gauges.
        samples: new observations of the histograms.
    """

    counters: Counter[Series] = field(default_factory=Counter)
    gauges: dict[Series, float] = field(default_factory=dict)
    samples: defaultdict[Series, list[float]] = field(default_factory=lambda: defaultdict(list))

    def __bool__(self) -> bool:
        return bool(self.counters or self.gauges or self.samples)

    def count(self, name: str, *labels: str, by: int = 1) -> None:
        """Increment a counter of `METRICS`, with its labels in the order of `Metric.labels`."""
        # A counter without increments would show up as a series of its own.
        if by:
            self.counters[name, labels] += by

    def set(self, name: str, *labels: str, to: float) -> None:
        """Set a gauge of `METRICS`, with its labels in the order of `Metric.labels`."""
        self.gauges[name, labels] = to

    def sample(self, name: str, *labels: str, of: Iterable[float]) -> None:
        """Add observations to a histogram of `METRICS`, with its labels in the order of `Metric.labels`."""
        if seen := list(of):
            self.samples[name, labels] += seen

    def add(self, other: MetricsDelta) -> None:
        """Merge a later delta, which is not modified, into this one."""
        self.counters.update(other.counters)
        # The later value of a gauge is the current one.
        self.gauges.update(other.gauges)
        for series, seen in other.samples.items():
            self.samples[series] += seen

    def plain(self) -> dict[str, Any]:
        """Return the delta as a JSON-serializable dict.

        Returns:
            Dict with the keys ``counters``, ``gauges`` and ``samples``. Each value is a list of triples
            [name, label values, change]. The change is the increment of a counter, the current value of a
            gauge, or the list of observations of a histogram.
        """
        return {
            "counters": [[name, list(labels), n] for (name, labels), n in self.counters.items()],
            "gauges": [[name, list(labels), n] for (name, labels), n in self.gauges.items()],
            "samples": [[name, list(labels), seen] for (name, labels), seen in self.samples.items()],
        }

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> MetricsDelta:
        """Create a delta from the result of `plain`."""
        found = cls()
        for name, labels, n in plain["counters"]:
            found.count(name, *labels, by=n)
        for name, labels, n in plain["gauges"]:
            found.set(name, *labels, to=n)
        for name, labels, seen in plain["samples"]:
            found.sample(name, *labels, of=seen)
        return found
