"""What an engine's hooks do on every step of a rank that reads: the same calls, without an engine.

An engine's scheduler hands over block tables as lists of numbers; the hooks make arrays of them, start the
request's clock, hand the order to the lanes, take what has come to an end, and settle the clocks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvferry.cache.loads import Loads
from kvferry.planning.pieces import Int64s
from kvferry.planning.select import Span
from kvferry.planning.strategy import Strategy
from kvferry.transport.lane import ReadResult
from kvferry.transport.lease import LeaseWord
from kvferry.transport.read_plan import ReadOrder
from kvferry.transport.transfers import Transfers

LOAD_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request's load, as a scheduler hands it over.

    Attributes:
        key: names it; also the name of its lease.
        peer: name under which the peer was connected.
        span: how much of the prompt.
        src_tables, dst_tables: block ids by position and group.
        lease: the word of the producer's lease.
        strategy: pinned, None for the cheapest.
    """

    key: str
    peer: str
    span: Span
    src_tables: Sequence[list[int]]
    dst_tables: Sequence[list[int]]
    lease: LeaseWord
    strategy: Strategy | None = None


@dataclass(slots=True)
class Stepped:
    """What one step brought.

    Attributes:
        failures: load to its failure, None if it succeeded, of those reported.
        results: load to how it went, of those that landed.
    """

    failures: dict[str, str | None] = field(default_factory=dict)
    results: dict[str, ReadResult] = field(default_factory=dict)


class Steps:
    """The loads of one rank, step by step."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._loads = Loads(time.monotonic)

    def step(self, wanted: Sequence[Wanted] = ()) -> Stepped:
        """All hooks of one step.

        Args:
            wanted: loads to begin.
        """
        for load in wanted:
            self._loads.begin(load.key, LOAD_SECONDS)
            tables = as_arrays(load.src_tables), as_arrays(load.dst_tables)
            self._transfers.submit(
                ReadOrder(load.key, load.peer, load.span, *tables, load.lease, load.strategy)
            )
        stepped = Stepped()
        for result in self._transfers.results():
            stepped.results[result.key] = result
            self._loads.landed(result.key, result.failure)
        stepped.failures = self._loads.settle().reported
        return stepped


def as_arrays(tables: Sequence[list[int]]) -> tuple[Int64s, ...]:
    """Block tables as planning takes them."""
    return tuple(np.array(table, np.int64) for table in tables)
