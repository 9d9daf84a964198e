"""Which way a route will go and how long that should take: the planner's own choice.

The one place where a forecast meets the planner's cost model.
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
"""The name for no strategy in particular."""

ROOM_BYTES = TransferSettings().staging_bytes // 4
"""The largest image of cells that workers handle as they are by default."""


@dataclass(frozen=True, slots=True)
class Expected:
    """How a route will move.

    Attributes:
        strategy: which way.
        seconds: expected.
        read_descriptors, read_bytes: of the READs that are posted.
    """

    strategy: Strategy
    seconds: float
    read_descriptors: int
    read_bytes: int


@dataclass(frozen=True, slots=True)
class Pricing:
    """What a forecast goes by.

    Attributes:
        costs: of work on the machine and the link.
        pin: the strategy, where there is a choice; None for the cheapest.
    """

    costs: Costs
    pin: Strategy | None = None


def link(costs: Costs, gigabytes_per_second: float | None) -> Costs:
    """Costs over a link that is no faster than so many 1e9 bytes per second.

    Args:
        costs: of a machine.
        gigabytes_per_second: None for a link as fast as its memory.

    Raises:
        ConfigError: a speed that is none.
    """
    if gigabytes_per_second is None:
        return costs
    if not 0 < gigabytes_per_second < float("inf"):
        raise ConfigError(f"bandwidth is {gigabytes_per_second} GB/s, it must be above 0")
    seconds = max(costs.read_byte_seconds, 1 / (gigabytes_per_second * 1e9))
    # Lanes share the link.
    return replace(costs, read_byte_seconds=seconds, lanes_byte_gain=1.0)


def pinned(name: str) -> Strategy | None:
    """The strategy of that name; None, whichever is cheapest, for `AUTO`.

    Raises:
        ConfigError: there is none.
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
    """How the cells of a route will move.

    Args:
        route, cells: what moves.
        counts: totals over both.
        pricing: what work costs.
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
