"""The table of `benchmarks layout`: each cell is moved by every method.

A cell is a memory layout, the same on both sides, and the tensor-parallel ranks of the source and of the
reader. A method is a strategy, or `CHOSEN` for the strategy that the planner chooses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.overhead.planning import PlanningTimes
from kvferry.bench.rounds import MoverRounds
from kvferry.geometry.layout import lay_out
from kvferry.measuring.simulated import SimulatedEngine
from kvferry.measuring.spread import Spread
from kvferry.planning.packed_image import PackedImage, fetch_image, gather_image
from kvferry.planning.strategy import Strategy
from kvferry.planning.template import Route, build_templates

CHOSEN = "chosen"
METHODS = (*Strategy, CHOSEN)


@dataclass(frozen=True, slots=True)
class Cell:
    """A layout and a pair of parallel sizes.

    Attributes:
        layout: memory layout of both sides.
        src_tp, dst_tp: tensor-parallel ranks of each side.
    """

    layout: str
    src_tp: int
    dst_tp: int

    @property
    def parallel(self) -> str:
        """The parallel sizes as options take them, such as ``2:1``."""
        return f"{self.src_tp}:{self.dst_tp}"

    def __str__(self) -> str:
        return f"{self.layout} TP {self.src_tp}→{self.dst_tp}"


@dataclass(frozen=True, slots=True)
class Runs:
    """Mean length of contiguous stretches in what one rank reads, in bytes.

    Attributes:
        both: contiguous on both sides at once: a descriptor of a direct transfer.
        src, dst: contiguous on one side.
    """

    both: float
    src: float
    dst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRow:
    """The results of one cell.

    Attributes:
        cell: the cell.
        runs: contiguous bytes.
        strategy: strategies that the planner chose, joined by "+".
        ways: rounds by method.
        ratios: speed as a multiple of raw NIXL's in the same round, by method and round.
        planning: times of planning the long request with the chosen strategies.
    """

    cell: Cell
    runs: Runs
    strategy: str
    ways: Mapping[str, MoverRounds]
    ratios: Mapping[str, tuple[float, ...]]
    planning: PlanningTimes

    def ratio(self, way: str) -> Spread:
        """Return the speed of a method as a multiple of raw NIXL's."""
        return Spread.of(self.ratios[way])

    @property
    def best(self) -> str:
        """The fastest strategy."""
        return max((way for way in self.ways if way != CHOSEN), key=lambda way: self.ratio(way).median)

    def quartiles(self, way: str, other: str) -> tuple[float, float, float]:
        """Return median and quartiles of one method's speed as a multiple of another's, over rounds."""
        ratios = np.array(self.ratios[way]) / np.array(self.ratios[other])
        low, middle, high = np.percentile(ratios, (25, 50, 75)).tolist()
        return middle, low, high


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutTable:
    """The cells of one model.

    Attributes:
        model: name of the model.
        tokens: length of the request.
        raw: speed of raw NIXL with large descriptors in GB/s, one median per round.
        rows: results of the cells.
        left_out: cells that no engine can have, with the reason.
    """

    model: str
    tokens: int
    raw: tuple[float, ...]
    rows: tuple[LayoutRow, ...]
    left_out: tuple[tuple[str, str], ...]


def runs_of(src: SimulatedEngine, dst: SimulatedEngine, rank: int = 0) -> Runs:
    """Return the contiguous bytes in what one rank of `dst` reads from `src`."""
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
