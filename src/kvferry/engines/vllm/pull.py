"""One request's offer on its way into this engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import reduce

from kvferry.cache.bids import Bidding
from kvferry.engines.vllm.meta import Report
from kvferry.engines.vllm.offer import Offer
from kvferry.planning.select import Span
from kvferry.transport.handshake import Address


class PullState(Enum):
    """See `consumer` for the transitions."""

    OFFERED = "offered"
    LOADING = "loading"
    SETTLED = "settled"


@dataclass(slots=True)
class Pull:
    """What is known of it.

    Attributes:
        offer: what the request came with.
        bidding: which sources are struck out, how many attempts are left.
        state: where it stands.
        key, span, began: of the latest load.
        reports, reported: of that load: what workers have said, and how many have.
    """

    offer: Offer
    bidding: Bidding
    state: PullState = PullState.OFFERED
    key: str = ""
    span: Span | None = None
    began: float = 0.0
    reports: list[Report] = field(default_factory=list)
    reported: int = 0

    @property
    def address(self) -> Address:
        """Of the producer's control channel."""
        return self.offer.remote_host, self.offer.remote_port

    @property
    def lease(self) -> tuple[Address, str]:
        """Whose lease, and its name there."""
        return self.address, self.offer.remote_request_id

    @property
    def incarnation(self) -> int:
        """Which run of the producer made the offer."""
        return self.offer.remote_lease.incarnation

    @property
    def peer(self) -> str:
        """Name under which workers know the peer: this run of this engine."""
        host, port = self.address
        return f"{self.offer.remote_engine_id}@{host}:{port}#{self.incarnation:x}"

    def begin(self, key: str, span: Span, now: float) -> None:
        """A load is ordered; an attempt is spent."""
        self.state, self.key, self.span, self.began = PullState.LOADING, key, span, now
        self.reports.clear()
        self.reported = 0
        self.bidding.take()

    def hear(self, report: Report, workers: int) -> int:
        """So many more workers report the load, as one; how many have by now."""
        self.reports.append(report)
        self.reported += workers
        return self.reported

    def whole(self) -> Report:
        """All workers' reports as one."""
        return reduce(Report.with_other, self.reports)
