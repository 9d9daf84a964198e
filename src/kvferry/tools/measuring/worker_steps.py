"""The calls that a worker of an engine makes in every step to load KV, without an engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvferry.connector.bids import Bid
from kvferry.connector.load import Load
from kvferry.connector.messages import LoadPart
from kvferry.connector.worker.loads import Loads
from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import LoadSpan
from kvferry.planning.strategy import Strategy
from kvferry.transport.lease import LeaseWord
from kvferry.transport.read_order import ReadOrder, ReadResult
from kvferry.transport.transfers import Transfers

# So long that a busy machine does not end a measurement.
LOAD_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """The scheduler's request to a worker to load a prompt's KV from a peer.

    Attributes:
        key: name of the load and of its lease, unique in this engine.
        peer: name under which the worker connected to the peer.
        src_tables, dst_tables: block ids of each KV cache group, on the peer and on this rank.
        strategy: transfer strategy to use; None for the cheapest.
    """

    key: str
    peer: str
    span: LoadSpan
    src_tables: Sequence[list[int]]
    dst_tables: Sequence[list[int]]
    lease: LeaseWord
    strategy: Strategy | None = None


@dataclass(slots=True)
class StepOutcome:
    """The loads that ended, as seen by a worker in one engine step.

    Attributes:
        failures: for each load that the worker reports to the scheduler, the reason why it failed, or None
            if it succeeded.
        results: results of the loads that the lanes have finished. If a load passed its deadline, `failures`
            of an earlier step already reported it as failed.
    """

    failures: dict[str, str | None] = field(default_factory=dict)
    results: dict[str, ReadResult] = field(default_factory=dict)


class WorkerSteps:
    """Runs the KV loads of one rank, as a worker does in every engine step."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._loads = Loads(time.monotonic)

    def step(self, requests: Sequence[LoadRequest] = ()) -> StepOutcome:
        """Begin new loads, and return those that have ended or passed their deadline since the last call."""
        for load in requests:
            # In the step, because the block ids are known only then.
            source, tables = as_arrays(load.src_tables), as_arrays(load.dst_tables)
            self._loads.begin(
                Load(
                    key=load.key,
                    request_id=load.key,
                    attempt=load.key,
                    loads=1,
                    bid=Bid(load.peer, ()),
                    span=load.span,
                    tables=tables,
                    timeout_seconds=LOAD_SECONDS,
                    began=0.0,
                )
            )
            order = ReadOrder(load.key, load.peer, load.span, source, tables, load.lease, load.strategy)
            self._loads.add(LoadPart(load.key, order, last=True))
            self._transfers.submit(order)
        stepped = StepOutcome()
        for result in self._transfers.results():
            stepped.results[result.key] = result
            self._loads.on_part_ended(result.key, result.failure, result)
        for one in self._loads.settle():
            if one.report is not None:
                stepped.failures[one.load.key] = one.report.failure
        return stepped


def as_arrays(tables: Sequence[list[int]]) -> tuple[Int64s, ...]:
    """Convert block tables from lists of block ids to int64 arrays."""
    return tuple(np.array(table, np.int64) for table in tables)
