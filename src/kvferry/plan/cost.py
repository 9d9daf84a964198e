"""The planner's choice of strategy for a route, and the expected seconds.

Only this module connects a forecast to the planner's cost model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from kvferry.errors import ConfigError
from kvferry.planning.prepared_lists import TransferCounts
from kvferry.planning.select import Cells
from kvferry.planning.strategy import Costs, Strategy, choose_method, segment_bytes, transfer_methods
from kvferry.planning.template import Route
from kvferry.transport.settings import TransferSettings

AUTO = "auto"
"""The name of the choice to take the cheapest strategy."""

ROOM_BYTES = TransferSettings().staging_bytes // 4
"""The largest image of a cell that workers handle with default settings."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected transfer of a route.

    Attributes:
        strategy: the planner's choice.
        seconds: expected duration.
        read_descriptors, read_bytes: descriptors and bytes of the READs that are posted.
    """

    strategy: Strategy
    seconds: float
    read_descriptors: int
    read_bytes: int


@dataclass(frozen=True, slots=True)
class Pricing:
    """The costs and the strategy that a forecast assumes.

    Attributes:
        costs: costs of work on the machine and the link.
        pin: the strategy to take if there is a choice; None for the cheapest.
    """

    costs: Costs
    pin: Strategy | None = None


def link(costs: Costs, gigabytes_per_second: float | None) -> Costs:
    """Return the costs over a link of limited bandwidth.

    Args:
        costs: costs of a machine.
        gigabytes_per_second: bandwidth in 1e9 bytes per second; None for a link as fast as its memory.

    Raises:
        ConfigError: the bandwidth is not a finite number above 0.
    """
    if gigabytes_per_second is None:
        return costs
    if not 0 < gigabytes_per_second < float("inf"):
        raise ConfigError(f"bandwidth is {gigabytes_per_second} GB/s, it must be above 0")
    seconds = max(costs.read_byte_seconds, 1 / (gigabytes_per_second * 1e9))
    # Lanes share the link.
    return replace(costs, read_byte_seconds=seconds, lanes_byte_gain=1.0)


def pinned(name: str) -> Strategy | None:
    """Return the strategy of that name; None, for the cheapest, if it is `AUTO`.

    Raises:
        ConfigError: no strategy has that name.
    """
    if name == AUTO:
        return None
    try:
        return Strategy(name)
    except ValueError:
        raise ConfigError(
            f"strategy {name!r} is not known; choose one of {AUTO}, {', '.join(Strategy)}"
        ) from None


def expected(route: Route, cells: Cells, counts: TransferCounts, pricing: Pricing) -> Expected:
    """Return the expected transfer of a route's cells.

    Args:
        route, cells: the route, and its cells that move.
        counts: totals over these cells.
        pricing: costs, and the strategy if it is pinned.
    """
    costs = pricing.costs
    found = transfer_methods(route, costs, ROOM_BYTES)
    way = found[choose_method(found, len(cells), costs, pricing.pin)]
    seconds = way.work.seconds(len(cells), costs)
    read_bytes = round(way.work.read_bytes * len(cells))
    if way.strategy is Strategy.DIRECT:
        descriptors = counts.descriptors
    else:
        # An image that is read whole goes in chunks.
        descriptors = ceil(way.work.descriptors * len(cells)) or ceil(read_bytes / segment_bytes(read_bytes))
    return Expected(way.strategy, seconds, descriptors, read_bytes)
