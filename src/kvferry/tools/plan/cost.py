"""The planner's choice of a transfer strategy for a route, and the expected seconds."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Self

from kvferry.common.errors import ConfigError
from kvferry.planning.prepared_lists import TransferCounts, count_transfer
from kvferry.planning.select import Cells
from kvferry.planning.strategy import Costs, Strategy, choose_method, segment_bytes, transfer_methods
from kvferry.planning.template import Route
from kvferry.transport.costs import TransferSettings

# Stands for the cheapest strategy.
AUTO = "auto"

# Largest packed cell that workers can handle with default settings.
ROOM_BYTES = TransferSettings().staging_bytes // 4


@dataclass(frozen=True, slots=True)
class RouteEstimate:
    """The expected strategy, duration and READs of a route.

    Attributes:
        strategy: `Pricing.strategy` if it is possible, otherwise the cheapest strategy.
        read_descriptors, read_bytes: total number of descriptors, and of bytes, of all READs.
    """

    strategy: Strategy
    seconds: float
    read_descriptors: int
    read_bytes: int


@dataclass(frozen=True, slots=True)
class Pricing:
    """The costs of transfer work, and the transfer strategy, that a forecast assumes.

    Attributes:
        strategy: strategy to use where it is possible; None for the cheapest strategy.
        one_machine: True if the engines run on one machine, and can share host memory.
    """

    costs: Costs
    strategy: Strategy | None = None
    one_machine: bool = False


def limit_bandwidth(costs: Costs, gigabytes_per_second: float | None) -> Costs:
    """Return the costs of transfer work if a network link of some 1e9 bytes per second limits the bandwidth.

    Raises:
        ConfigError: the bandwidth is not a finite number above 0.
    """
    if gigabytes_per_second is None:
        return costs
    if not 0 < gigabytes_per_second < float("inf"):
        raise ConfigError(f"bandwidth is {gigabytes_per_second} GB/s, it must be above 0")
    seconds = max(costs.read_byte_seconds, 1 / (gigabytes_per_second * 1e9))
    # All lanes share the link, so more lanes do not transfer more bytes.
    return replace(costs, read_byte_seconds=seconds, lanes_byte_gain=1.0)


def parse_strategy(name: str) -> Strategy | None:
    """Return the strategy with this name; None for `AUTO`.

    Raises:
        ConfigError: no strategy has this name.
    """
    if name == AUTO:
        return None
    try:
        return Strategy(name)
    except ValueError:
        raise ConfigError(
            f"strategy {name!r} is not known; choose one of {AUTO}, {', '.join(Strategy)}"
        ) from None


def estimate_route(route: Route, cells: Cells, counts: TransferCounts, pricing: Pricing) -> RouteEstimate:
    """Forecast the transfer of one request over a route.

    Args:
        cells: cells of the route that the request transfers.
        counts: number of descriptors and of bytes if these cells are transferred directly.
    """
    costs = pricing.costs
    shared = pricing.one_machine or pricing.strategy is Strategy.SHARED
    found = transfer_methods(route, costs, ROOM_BYTES, shared=shared)
    method = found[choose_method(found, len(cells), costs, pricing.strategy)]
    seconds = method.work.seconds(len(cells), costs)
    read_bytes = round(method.work.read_bytes * len(cells))
    if method.strategy is Strategy.DIRECT:
        descriptors = counts.descriptors
    else:
        # Images that are read whole need one descriptor per segment.
        descriptors = ceil(method.work.descriptors * len(cells)) or ceil(
            read_bytes / segment_bytes(read_bytes)
        )
    return RouteEstimate(method.strategy, seconds, descriptors, read_bytes)


# Stands for the strategies of a transfer whose routes use several.
MIXED = "mixed"


@dataclass(slots=True)
class TransferEstimate:
    """The expected transfer of a prompt's KV, for one kind of layer or for all layers.

    One route after the other is added.

    Attributes:
        pages: number of pages that are written at the destination, over all ranks.
        descriptors: number of runs, after adjacent runs of consecutive cells are merged.
        bytes: bytes that all ranks of the destination need, without those that are read and discarded.
        full_bytes: value that `bytes` would have if all layers had full attention; None if the model has no
            attention layers.
        runs: number of bytes in runs of each length.
        strategies: distinct transfer strategies of the routes.
        read_descriptors, read_bytes: total number of descriptors, and of bytes, of all READs.
        rank_seconds: expected duration by index of a destination rank.
    """

    pages: int = 0
    descriptors: int = 0
    bytes: int = 0
    full_bytes: int | None = 0
    runs: Counter[int] = field(default_factory=Counter)
    strategies: set[Strategy] = field(default_factory=set)
    read_descriptors: int = 0
    read_bytes: int = 0
    rank_seconds: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def run_bytes(self) -> int:
        """Weighted median of the run length: half of all bytes are in runs of this length or longer runs."""
        return median_run(+self.runs)

    @property
    def block_run_bytes(self) -> int:
        """Length of the longest run inside one cell."""
        return max(+self.runs, default=0)

    @property
    def strategy(self) -> str:
        """Name of the transfer strategy; `MIXED` if several are used."""
        strategies = self.strategies or {Strategy.DIRECT}
        return next(iter(strategies)).value if len(strategies) == 1 else MIXED

    @property
    def seconds(self) -> float:
        """Expected duration on the slowest rank."""
        return max(self.rank_seconds.values(), default=0.0)

    def add(self, rank: int, route: Route, cells: Cells, full: Cells, pricing: Pricing) -> None:
        """Add a route to a destination rank.

        Args:
            full: cells of the route that would be transferred if its layers had full attention.
        """
        counted = count_transfer(route, cells)
        self.pages += len(route.layers) * len(set(cells.dst_block.tolist()))
        self.descriptors += counted.descriptors
        self.bytes += counted.bytes
        self.full_bytes = (self.full_bytes or 0) + count_transfer(route, full).bytes
        for cell_copy in route.cell_copies:
            for length, count in cell_copy.lengths:
                self.runs[length] += length * count * len(cells)
        if len(cells):
            route_estimate = estimate_route(route, cells, counted, pricing)
            self.strategies.add(route_estimate.strategy)
            self.read_descriptors += route_estimate.read_descriptors
            self.read_bytes += route_estimate.read_bytes
            self.rank_seconds[rank] += route_estimate.seconds

    @classmethod
    def of(cls, parts: Iterable[Self]) -> Self:
        """Return the sum of several estimates."""
        whole = cls()
        for part in parts:
            whole.pages += part.pages
            whole.descriptors += part.descriptors
            whole.bytes += part.bytes
            known = None not in (whole.full_bytes, part.full_bytes)
            whole.full_bytes = (whole.full_bytes or 0) + (part.full_bytes or 0) if known else None
            whole.runs.update(part.runs)
            whole.strategies |= part.strategies
            whole.read_descriptors += part.read_descriptors
            whole.read_bytes += part.read_bytes
            # A rank reads its routes one after the other.
            for rank, seconds in part.rank_seconds.items():
                whole.rank_seconds[rank] += seconds
        return whole


def median_run(runs: Mapping[int, int]) -> int:
    """Return the weighted median of the run length, from the number of bytes in runs of each length."""
    half, seen = sum(runs.values()) / 2, 0
    for length in sorted(runs, reverse=True):
        seen += runs[length]
        if seen >= half:
            return length
    return 0
