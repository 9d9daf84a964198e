"""The table of `benchmarks layout`: the measured transfers of each cell with every method.

A cell of the table is a memory layout, the same on both sides, with the numbers of tensor-parallel ranks of
the source and of the reader. A method is a strategy, or `CHOSEN` for the strategy that the planner chooses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.overhead.planning import PlanningTimes
from kvferry.planning.packed_image import PackedImage, fetch_image, gather_image
from kvferry.planning.strategy import Strategy
from kvferry.planning.template import Route, build_templates
from kvferry.tools.bench.rounds import MoverRounds
from kvferry.tools.measuring.rounds import Spread
from kvferry.tools.measuring.simulated import SimulatedEngine
from kvferry.tools.models.layout import lay_out

CHOSEN = "chosen"
READS = (Strategy.DIRECT, Strategy.OVER_READ, Strategy.STAGED)
METHODS = (*READS, CHOSEN)


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of the table: a memory layout and a pair of parallel sizes.

    Attributes:
        layout: memory layout of both sides.
        src_tp, dst_tp: number of tensor-parallel ranks of the source and of the reader.
    """

    layout: str
    src_tp: int
    dst_tp: int

    @property
    def parallel(self) -> str:
        """Return the parallel sizes in the form of the command's option, such as ``2:1``."""
        return f"{self.src_tp}:{self.dst_tp}"

    def __str__(self) -> str:
        return f"{self.layout} TP {self.src_tp}→{self.dst_tp}"


@dataclass(frozen=True, slots=True)
class Runs:
    """The mean lengths of the contiguous runs that one rank reads, in bytes.

    Attributes:
        both: length of runs that are contiguous on both sides, such as a descriptor of a direct transfer.
        src, dst: length of runs that are contiguous on the source, and on the reader.
    """

    both: float
    src: float
    dst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRow:
    """The results of one cell.

    Attributes:
        cell: layout and parallel sizes.
        runs: lengths of the contiguous runs.
        strategy: names of the strategies that the planner chose, joined by "+".
        ways: measured rounds by method.
        ratios: speeds as multiples of raw NIXL's speed in the same round, one per round, by method.
        planning: times to plan a long request with the chosen strategies.
    """

    cell: Cell
    runs: Runs
    strategy: str
    ways: Mapping[str, MoverRounds]
    ratios: Mapping[str, tuple[float, ...]]
    planning: PlanningTimes

    def ratio(self, way: str) -> Spread:
        """Return the speed of a method as a multiple of raw NIXL's speed."""
        return Spread.of(self.ratios[way])

    @property
    def descriptors(self) -> int:
        """Return the number of descriptors of a direct transfer."""
        return round(self.ways[CHOSEN].bytes / self.runs.both)

    @property
    def best(self) -> str:
        """Return the fastest strategy, by the median."""
        return max((way for way in self.ways if way != CHOSEN), key=lambda way: self.ratio(way).median)

    def quartiles(self, way: str, other: str) -> tuple[float, float, float]:
        """Return median, lower and upper quartile of one method's speed as a multiple of another's."""
        ratios = np.array(self.ratios[way]) / np.array(self.ratios[other])
        low, middle, high = np.percentile(ratios, (25, 50, 75)).tolist()
        return middle, low, high


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutTable:
    """The results of all cells for one model.

    Attributes:
        model: name of the model.
        tokens: length of the request, in tokens.
        raw: median speed of raw NIXL with large descriptors in each round, in GB/s.
        rows: results of the cells.
        left_out: cells that are impossible for this model, with the reason.
    """

    model: str
    tokens: int
    raw: tuple[float, ...]
    rows: tuple[LayoutRow, ...]
    left_out: tuple[tuple[str, str], ...]


def runs_of(src: SimulatedEngine, dst: SimulatedEngine, rank: int = 0) -> Runs:
    """Return the mean lengths of the contiguous runs that one rank of `dst` reads from `src`."""
    templates = build_templates(lay_out(src.model, src.shape), lay_out(dst.model, dst.shape)[rank])
    routes = [route for template in templates for route in template.routes]
    size = sum(route.cell_bytes for route in routes)
    return Runs(
        size / sum(route.run_count for route in routes),
        size / sum(_read_count(route, fetch_image(route.cell_copies, 0)) for route in routes),
        size / sum(_read_count(route, gather_image(route.cell_copies)) for route in routes),
    )


def _read_count(route: Route, image: PackedImage | None) -> int:
    """Return the number of reads per copied cell with a packed image; without one, the number of runs.

    Args:
        route: copies from one rank to another.
        image: packed image (the cell's bytes in staging memory); None if there are too many runs to pack.
    """
    return sum(len(each.descriptors) for each in image.reads) if image else route.run_count
