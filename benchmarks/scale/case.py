"""The contract of a case: units whose number grows, and what is measured of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

from benchmarks.scale.result import Measure

Figures: TypeAlias = Mapping[str, float]
"""Figure per unit, by name of the measure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A case: what is measured while the number of its units grows.

    Attributes:
        name: name of the case.
        noun: name of the units.
        sizes: numbers of units, ascending.
        measures: what is measured, in the order of the report.
        prepare: function that makes what all rounds of a size share. It takes the number of units, and
            returns a context manager that yields a function. The function measures one round.
        once: function that measures what is the same in every round. It takes the number of units.
    """

    name: str
    noun: str
    sizes: tuple[int, ...]
    measures: tuple[Measure, ...]
    prepare: Callable[[int], AbstractContextManager[Callable[[], Figures]]]
    once: Callable[[int], Figures]
