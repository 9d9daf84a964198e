"""The value that describes a load, the same from admission to every worker."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.connector.bids import Bid
from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import LoadSpan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Load:
    """A load of a prefix, or of a part of one, from one source.

    Two loads are equal only if they are the same object.

    Attributes:
        key: unique name in this engine.
        request_id: the request that waits for it.
        attempt: name of the attempt that it belongs to.
        loads: number of loads of that attempt.
        bid: the bid that was taken.
        span: the tokens of the prompt.
        tables: block ids to write, by position per group: int64 arrays; of a state group the one block for
            the snapshot.
        timeout_seconds: deadline, counted from when a worker takes the load.
        began: monotonic seconds in the scheduler's process.
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
        """Name of the source whose bid was taken."""
        return self.bid.source
