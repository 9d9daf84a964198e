"""The reads of each load from a peer, on one worker.

A load has several reads if its KV is read while the peer computes it. Each is an order of its own for the
lanes, which check the lease word after its data. So the load has succeeded when all its reads have.

    OPEN ─last read begun─▶ WHOLE ─no read in flight─▶ ended
      └─a read has failed, or no more will come─▶ FAILED ─no read in flight─▶ ended, as failed

Reads that arrive for a load that has failed or ended are not begun: its blocks may belong to others by then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kvferry.connector.messages import LoadRead
from kvferry.transport.lane import ReadResult
from kvferry.transport.read_order import ReadOrder
from kvferry.transport.read_plan import join_plans


@dataclass(slots=True)
class _Reads:
    """The reads of a load that has not ended.

    Attributes:
        in_flight: number of reads whose result is missing.
        whole: True if the last read has begun.
        failure: reason why the load has failed; None if it has not.
        results: results of the reads that have ended.
    """

    in_flight: int = 0
    whole: bool = False
    failure: str | None = None
    results: list[ReadResult] = field(default_factory=list)


class LoadReads:
    """The loads from peers that have not ended on this worker, with their reads.

    Only the engine's thread calls the methods.
    """

    def __init__(self) -> None:
        """Create an empty collection of loads."""
        self._loads: dict[str, _Reads] = {}
        self._orders: dict[str, str] = {}

    def __len__(self) -> int:
        """Return the number of loads that have not ended."""
        return len(self._loads)

    def begin(self, loads: Iterable[str]) -> None:
        """Add loads from peers, given by their keys. They have no reads yet."""
        self._loads.update({load: _Reads() for load in loads})

    def add(self, read: LoadRead) -> ReadOrder | None:
        """Add the next part of a load. Return the order that must be begun now; None if there is none.

        Args:
            read: part of a load. It is ignored if the load has failed or ended.
        """
        reads = self._loads.get(read.load)
        if reads is None or reads.whole or reads.failure is not None:
            return None
        reads.whole, reads.failure = read.last, read.failure
        if read.order is None:
            return None
        reads.in_flight += 1
        self._orders[read.order.key] = read.load
        return read.order

    def on_result(self, result: ReadResult) -> None:
        """Record that a read has ended.

        Args:
            result: result of the read. `ReadResult.key` is the key of its order.
        """
        reads = self._loads[self._orders.pop(result.key)]
        reads.in_flight -= 1
        reads.failure = reads.failure or result.failure
        reads.results.append(result)

    def fail(self, load: str, why: str) -> None:
        """Begin no more reads of a load. Ignore a load that has ended, and one that is not from a peer.

        Args:
            load: key of the load.
            why: reason for the failure.
        """
        if (reads := self._loads.get(load)) is not None and reads.failure is None:
            reads.failure = why

    def take_ended(self) -> list[ReadResult]:
        """Return and forget the loads that have ended: one result for each, whose key is that of the load."""
        over = {
            load: reads
            for load, reads in self._loads.items()
            if not reads.in_flight and (reads.whole or reads.failure is not None)
        }
        for load in over:
            del self._loads[load]
        return [_joined(load, reads) for load, reads in over.items()]


def _joined(load: str, reads: _Reads) -> ReadResult:
    plans = [result.plan for result in reads.results if result.plan is not None]
    return ReadResult(
        key=load,
        failure=reads.failure,
        plan=replace(join_plans(plans), seconds=sum(plan.seconds for plan in plans)) if plans else None,
        transfer_seconds=sum(result.transfer_seconds for result in reads.results),
        check_seconds=sum(result.check_seconds for result in reads.results),
        peer_lost=any(result.peer_lost for result in reads.results),
        reads=len(reads.results),
    )
