"""Sources of KV that a request need not compute: the interface between admission and its sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Protocol

from kvferry.connector.bids import Bid, Bidding
from kvferry.connector.engine import BlockIds, Request
from kvferry.connector.events import GroupBytes, MissReason, SourceMiss
from kvferry.connector.messages import Report, StepOrders
from kvferry.planning.select import LoadSpan


@dataclass(slots=True)
class Load:
    """A load of a prefix, or of a part of one, from one source.

    Attributes:
        key: unique name in this engine.
        request_id: the request that waits for it.
        attempt: name of the attempt that it belongs to.
        loads: number of loads of that attempt.
        bid: the bid that was taken.
        span: the tokens of the prompt.
        tables: our block ids by position per group; of a state group the one block for the snapshot.
        began: monotonic seconds.
        given_up: another load of the attempt has failed, so nobody waits for this one.
        reports: the workers' reports.
        reported: number of workers that have reported.
    """

    key: str
    request_id: str
    attempt: str
    loads: int
    bid: Bid
    span: LoadSpan
    tables: BlockIds
    began: float
    given_up: bool = False
    reports: list[Report] = field(default_factory=list)
    reported: int = 0

    @property
    def source(self) -> str:
        """Name of the source whose bid was taken."""
        return self.bid.source

    def hear(self, report: Report, workers: int) -> int:
        """Add a report of `workers` workers; return how many have reported by now."""
        self.reports.append(report)
        self.reported += workers
        return self.reported

    def whole(self) -> Report:
        """Return all workers' reports as one."""
        return reduce(Report.with_other, self.reports)


class Source(Protocol):
    """A source of prefixes. The engine's thread calls it, so no method may block.

    Attributes:
        name: its name in metrics.
    """

    name: str

    def arrived(self, request: Request, bidding: Bidding) -> bool:
        """Return whether this source might serve a request that came in."""

    def declined(self, request: Request) -> SourceMiss | None:
        """Return why the request cannot be served; None if nobody asked for that."""

    def bids(self, request: Request, have: int) -> Sequence[Bid]:
        """Return bids for tokens beyond the `have` that the engine has. May be called again."""

    def lack(self, request: Request, have: int) -> SourceMiss:
        """Return why the last `bids` were none."""

    def head(self, request: Request, have: int, alignment_tokens: int) -> Bid | None:
        """Return a bid for the beginning of a prefix whose rest another source has.

        It brings only layers that see all tokens. Called after `bids`, with the same arguments.

        Args:
            request: the request.
            have: tokens that the engine has.
            alignment_tokens: the beginning ends at a multiple of so many tokens.
        """

    def tail(self, request: Request, have: int, first: int) -> Bid | None:
        """Return a bid for the rest of a prefix, from token `first` on. Called as `head`."""

    def room(self, bid: Bid, blocks: int) -> bool:
        """Return whether a load that may hold `blocks` blocks past its deadline can begin now."""

    def begin(self, load: Load, request: Request) -> None:
        """Order the load of a bid that was taken."""

    def alignments(self, load: Load) -> tuple[int, ...]:
        """Return tokens per group: loaded content begins at a multiple of them, at or before a window."""

    def origin(self, load: Load) -> str:
        """Return the place that most of a load comes from: ``peer``, or a tier's name."""

    def brought(self, load: Load, report: Report) -> tuple[GroupBytes, ...]:
        """Return the bytes that a load brought. Called before `forget`."""

    def blame(self, load: Load, report: Report) -> MissReason:
        """Return the kind of a load's failure. Called before `forget`."""

    def ended(self, load: Load, report: Report) -> None:
        """Handle the end of a load that all workers have reported; strike out what made it fail."""

    def forget(self, load: Load) -> None:
        """Forget a load that all workers have reported, whoever still waits for it."""

    def dropped(self, load: Load) -> None:
        """Drop a load under way: its request has ended, or another load of the attempt has failed.

        Workers still report it.
        """

    def settled(self, request_id: str) -> None:
        """Release what is held for a request that has been served, or is computed."""

    def finished(self, request_id: str) -> None:
        """Forget a request that has ended."""

    def hand_over(self, orders: StepOrders) -> None:
        """Add this source's orders to the step's."""
