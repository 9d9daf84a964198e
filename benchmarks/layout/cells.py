"""What `benchmarks layout` compares: cells of a table, each moved in every way.

A cell is a memory layout, the same on both sides, and the tensor-parallel ranks of the side that has the
request and of the side that reads it. A way is a strategy, pinned, or `CHOSEN`: whatever the planner takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.overhead.planning import Arithmetic
from kvferry.bench.rounds import MoverRounds
from kvferry.geometry.layout import lay_out
from kvferry.measuring.simulated import SimulatedEngine
from kvferry.measuring.spread import Spread
from kvferry.planning.packed_image import PackedImage, fetch_image, gather_image
from kvferry.planning.strategy import Strategy
from kvferry.planning.template import Route, build_templates

CHOSEN = "chosen"
WAYS = (*Strategy, CHOSEN)


@dataclass(frozen=True, slots=True)
class Cell:
    """See the module.

    Attributes:
        layout: of both sides.
        src_tp, dst_tp: ranks of each side.
    """

    layout: str
    src_tp: int
    dst_tp: int

    @property
    def parallel(self) -> str:
        """Ranks for people, and as options take them: ``2:1``."""
        return f"{self.src_tp}:{self.dst_tp}"

    def __str__(self) -> str:
        return f"{self.layout} TP {self.src_tp}→{self.dst_tp}"


@dataclass(frozen=True, slots=True)
class Runs:
    """Bytes that are contiguous, on average over what one rank reads.

    Attributes:
        both: on both sides at once: a descriptor of a direct move.
        src, dst: on either side by itself.
    """

    both: float
    src: float
    dst: float


@dataclass(frozen=True, slots=True)
class Row:
    """A cell, measured.

    Attributes:
        cell: which.
        runs: how its bytes lie.
        strategy: what the planner chose, of all groups.
        ways: way to its rounds.
        ratios: way to its speed as a multiple of raw NIXL's in the same round, per round.
        planning: of the long request, in the chosen way.
    """

    cell: Cell
    runs: Runs
    strategy: str
    ways: Mapping[str, MoverRounds]
    ratios: Mapping[str, tuple[float, ...]]
    planning: Arithmetic

    def ratio(self, way: str) -> Spread:
        """Speed as a multiple of raw NIXL's."""
        return Spread.of(self.ratios[way])

    @property
    def best(self) -> str:
        """The strategy that was fastest."""
        return max((way for way in self.ways if way != CHOSEN), key=lambda way: self.ratio(way).median)

    def quartiles(self, way: str, other: str) -> tuple[float, float, float]:
        """How many times as fast as another way: median and quartiles of the ratio within rounds."""
        ratios = np.array(self.ratios[way]) / np.array(self.ratios[other])
        low, middle, high = np.percentile(ratios, (25, 50, 75)).tolist()
        return middle, low, high


@dataclass(frozen=True, slots=True)
class Table:
    """All cells of one model.

    Attributes:
        model: its name.
        tokens: of the request that was moved.
        raw: raw NIXL with large descriptors, median of every round, GB/s.
        rows: cells.
        left_out: what an engine cannot be, and why.
    """

    model: str
    tokens: int
    raw: tuple[float, ...]
    rows: tuple[Row, ...]
    left_out: tuple[tuple[str, str], ...]


def runs_of(src: SimulatedEngine, dst: SimulatedEngine, rank: int = 0) -> Runs:
    """How the bytes that a rank of `dst` reads from `src` lie."""
    templates = build_templates(lay_out(src.model, src.shape), lay_out(dst.model, dst.shape)[rank])
    routes = [route for template in templates for route in template.routes]
    size = sum(route.cell_bytes for route in routes)
    return Runs(
        size / sum(route.row_count for route in routes),
        size / sum(_read_count(route, fetch_image(route.cell_copies, 0)) for route in routes),
        size / sum(_read_count(route, gather_image(route.cell_copies)) for route in routes),
    )


def _read_count(route: Route, image: PackedImage | None) -> int:
    """Per cell; as many as runs if they are too many to be packed."""
    return sum(len(each.descriptors) for each in image.reads) if image else route.row_count
