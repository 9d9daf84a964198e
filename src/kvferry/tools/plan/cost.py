"""The planner's choice of a transfer strategy for a route, and the expected seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from kvferry.errors import ConfigError
from kvferry.planning.prepared_lists import TransferCounts
from kvferry.planning.select import Cells
from kvferry.planning.strategy import Costs, Strategy, choose_method, segment_bytes, transfer_methods
from kvferry.planning.template import Route
from kvferry.transport.settings import TransferSettings

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
