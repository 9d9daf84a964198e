"""Totals of a transfer over the routes of all ranks.

A *route* is a set of layers that are copied together between two ranks. A *run* is a range of bytes that is
contiguous at the source and at the destination.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from kvferry.plan.cost import Pricing, estimate_route
from kvferry.planning.prepared_lists import count_transfer
from kvferry.planning.select import Cells
from kvferry.planning.strategy import Strategy
from kvferry.planning.template import Route

MIXED = "mixed"
"""Strategy name of a transfer whose routes use different strategies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferEstimate:
    """The expected transfer of a prompt's KV, for one kind of layer or for all layers.

    A *run* is a range of bytes that is contiguous at the source and at the destination.

    Attributes:
        pages: number of pages (one block in one layer) that are written at the destination, over all ranks.
        descriptors: number of runs, after adjacent runs of consecutive cells are merged. A cell is the part
            of a block that is copied as one unit.
        bytes: number of bytes that the destination needs, over all its ranks. Bytes that are read and
            discarded are not counted.
        full_bytes: value that `bytes` would have if all layers had full attention; None if the model has no
            attention layers.
        run_bytes: weighted median of the run length in bytes: half of all bytes are in runs of this length
            or longer runs.
        block_run_bytes: length in bytes of the longest run inside one cell.
        strategy: name of the transfer strategy; `MIXED` if several strategies are used.
        read_descriptors, read_bytes: total number of descriptors, and of bytes, of all READs.
        seconds: expected duration in seconds on the slowest rank.
    """

    pages: int
    descriptors: int
    bytes: int
    full_bytes: int | None
    run_bytes: int
    block_run_bytes: int
    strategy: str
    read_descriptors: int
    read_bytes: int
    seconds: float


@dataclass(slots=True)
class TransferTotals:
    """The running totals of a transfer, to which one route after the other is added.

    A route is a set of layers that are copied together between two ranks.

    Attributes:
        pages, descriptors, bytes, full_bytes, read_descriptors, read_bytes: totals over the added routes.
            `TransferEstimate` explains them.
        runs: maps a run length in bytes to the number of bytes in runs of this length.
        strategies: distinct transfer strategies of the added routes.
        seconds: maps the index of a destination rank to its expected duration in seconds.
    """

    pages: int = 0
    descriptors: int = 0
    bytes: int = 0
    full_bytes: int = 0
    runs: Counter[int] = field(default_factory=Counter)
    strategies: set[Strategy] = field(default_factory=set)
    read_descriptors: int = 0
    read_bytes: int = 0
    seconds: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, rank: int, route: Route, cells: Cells, full: Cells, pricing: Pricing) -> None:
        """Add a route to these totals.

        A cell is the part of a block that is copied as one unit.

        Args:
            rank: index of the destination rank.
            route: layers that are copied together from one source rank to the destination rank.
            cells: cells of the route that are transferred.
            full: cells of the route that would be transferred if its layers had full attention.
            pricing: costs of transfer work, and the required strategy if there is one.
        """
        counted = count_transfer(route, cells)
        self.pages += len(route.layers) * len(set(cells.dst_block.tolist()))
        self.descriptors += counted.descriptors
        self.bytes += counted.bytes
        self.full_bytes += count_transfer(route, full).bytes
        for cell_copy in route.cell_copies:
            for length, count in cell_copy.lengths:
                self.runs[length] += length * count * len(cells)
        if len(cells):
            route_estimate = estimate_route(route, cells, counted, pricing)
            self.strategies.add(route_estimate.strategy)
            self.read_descriptors += route_estimate.read_descriptors
            self.read_bytes += route_estimate.read_bytes
            self.seconds[rank] += route_estimate.seconds

    @classmethod
    def of(cls, parts: Iterable[Self]) -> Self:
        """Return the sum of several totals.

        `full_bytes` of the result is 0, because the caller passes this number to `estimate` instead.
        """
        whole = cls()
        for part in parts:
            whole.pages += part.pages
            whole.descriptors += part.descriptors
            whole.bytes += part.bytes
            whole.runs.update(part.runs)
            whole.strategies |= part.strategies
            whole.read_descriptors += part.read_descriptors
            whole.read_bytes += part.read_bytes
            for rank, seconds in part.seconds.items():
                whole.seconds[rank] += seconds
        return whole

    def estimate(self, full_bytes: int | None) -> TransferEstimate:
        """Return the expected transfer that these totals describe.

        Args:
            full_bytes: number of bytes that would be transferred if all layers had full attention; None if
                the model has no attention layers. It is used instead of the attribute `full_bytes`.
        """
        runs = {length: total for length, total in self.runs.items() if total}
        strategies = sorted(self.strategies) or [Strategy.DIRECT]
        return TransferEstimate(
            pages=self.pages,
            descriptors=self.descriptors,
            bytes=self.bytes,
            full_bytes=full_bytes,
            run_bytes=median_run(runs),
            block_run_bytes=max(runs, default=0),
            strategy=strategies[0].value if len(strategies) == 1 else MIXED,
            read_descriptors=self.read_descriptors,
            read_bytes=self.read_bytes,
            seconds=max(self.seconds.values(), default=0.0),
        )


def median_run(runs: Mapping[int, int]) -> int:
    """Return the weighted median of the run length: half of all bytes are in runs of this length or longer.

    A run is a range of bytes that is contiguous at the source and at the destination. The result is 0 if
    there are no runs.

    >>> median_run({1024: 3000, 65536: 5000}), median_run({1024: 5000, 65536: 3000})
    (65536, 1024)

    Args:
        runs: maps a run length in bytes to the number of bytes in runs of this length.
    """
    half, seen = sum(runs.values()) / 2, 0
    for length in sorted(runs, reverse=True):
        seen += runs[length]
        if seen >= half:
            return length
    return 0
