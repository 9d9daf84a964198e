"""The description of a load, as admission, the sources and the workers exchange it."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.connector.bids import Bid
from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import LoadSpan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Load:
    """A load of the KV of a prompt prefix, or of a part of a prefix, from one source.

    Two loads are equal only if they are the same object.

    Attributes:
        key: name of the load, unique in this engine.
        request_id: id of the request that waits for the load.
        attempt: name of the attempt to serve the request. Two loads that each load a part of one prefix have
            the same attempt.
        loads: number of loads of the attempt, 1 or 2.
        bid: the source's offer that was chosen.
        span: range of prompt tokens to load.
        tables: destination block table of each KV cache group, int64, indexed by block position. The table of
            a recurrent state group has one entry, the block that receives the state snapshot.
        timeout_seconds: seconds from the time when a worker begins the load to its deadline.
        began: time at which the load began, monotonic seconds in the scheduler's process.
    """

    key: str
    request_id: str
    attempt: str
    loads: int
    bid: Bid
    span: LoadSpan
    tables: tuple[Int64s, ...]
    timeout_seconds: float
    began: float

    @property
    def source(self) -> str:
        """Name of the source: the peer's name, or ``tiers``."""
        return self.bid.source
