"""The results of `benchmarks scale`: figures per unit by size and round, and ratios to the first size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvferry.common.units import format_bytes
from kvferry.tools.measuring.rounds import Spread

Unit = Literal["seconds", "bytes"]
_BYTES_WITH_UNIT = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """What is measured in a case.

    Attributes:
        name: short name, unique in the case.
        label: sentence part that names the work among `{n}` units.
        per: unit of work that a figure is for.
        unit: unit of the figures.
    """

    name: str
    label: str
    per: str
    unit: Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSizes:
    """The figures of one measure.

    Attributes:
        measure: what was measured.
        values: figure per unit, for each size in each round. A measure that is the same in every round, such
            as memory, has one round.
    """

    measure: Measure
    values: tuple[tuple[float, ...], ...]

    def figure(self, size: int) -> Spread:
        """Return the figure per unit over the rounds.

        Args:
            size: index of the size.
        """
        return Spread.of(self.values[size])

    def ratio(self, size: int) -> Spread:
        """Return the figure at a size divided by the figure at the first size in the same round.

        Args:
            size: index of the size.
        """
        pairs = zip(self.values[size], self.values[0], strict=True)
        return Spread.of([value / first for value, first in pairs])


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCase:
    """The figures of one case.

    Attributes:
        name: name of the case.
        noun: name of the units whose number grows.
        sizes: numbers of units, ascending.
        measures: figures of each measure.
    """

    name: str
    noun: str
    sizes: tuple[int, ...]
    measures: tuple[MeasuredSizes, ...]


def figure_text(value: float, unit: Unit) -> str:
    """Format a figure with three digits.

    >>> [figure_text(value, "seconds") for value in (4.21e-8, 3.456e-6, 0.0123)]
    ['42.1 ns', '3.46 µs', '12.3 ms']
    >>> figure_text(251.4, "bytes"), figure_text(70_000, "bytes"), figure_text(1.25, "bytes")
    ('251 B', '68.36 KiB', '1.25 B')
    """
    if unit == "bytes":
        if value >= _BYTES_WITH_UNIT:
            return format_bytes(value)
        return f"{value:.3g} B" if value < 1000 else f"{value:,.0f} B"
    for name, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {name}"
    return f"{value * 1e9:.3g} ns"
