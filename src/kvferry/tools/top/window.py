"""Compute the rates of counters between two readings of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.observe.exposed_names import SUFFIXES
from kvferry.tools.top.exposition import Scrape
from kvferry.tools.top.values import Labels, Values

# Counters and the parts of histograms grow, so they have rates. Gauges have none.
_CUMULATIVE = ("_total", *SUFFIXES)


@dataclass(frozen=True, slots=True)
class Window:
    """The current metric values and the rates of one engine, or their sums over several engines.

    Attributes:
        now: values of the last reading.
        rates: counters per second between the last two readings; None with only one reading.
    """

    now: Values
    rates: Values | None

    @classmethod
    def added(cls, windows: list[Window]) -> Window:
        """Return the sums of several engines' values and rates. Engines without rates add none."""
        rates = [window.rates for window in windows if window.rates is not None]
        return cls(Values.added(window.now for window in windows), Values.added(rates) if rates else None)


def window(before: Scrape | None, now: Scrape, engine: str) -> Window:
    """Return the metric values of one engine, and the rates of its counters between two readings.

    Args:
        before: reading before the last one; None if there is none.
        engine: value of the label ``engine`` of the engine's metrics, such as ``0``.
    """
    values = now.engines[engine]
    if before is None or now.at <= before.at:
        return Window(values, None)
    # A counter starts at 0 in a new process. So it does if it is new, or has decreased.
    again = before.started is not None and now.started is not None and now.started != before.started
    base = None if again else before.engines.get(engine)
    seconds = now.at - before.at

    def rates(name: str, series: Mapping[Labels, float]) -> dict[Labels, float]:
        was = {} if base is None else base.of.get(name, {})
        return {labels: _increase(was.get(labels, 0.0), value) / seconds for labels, value in series.items()}

    counted = {name: series for name, series in values.of.items() if name.endswith(_CUMULATIVE)}
    return Window(values, Values({name: rates(name, series) for name, series in counted.items()}))


def _increase(was: float, value: float) -> float:
    return value - was if value >= was else value
