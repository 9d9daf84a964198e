"""Sources of KV that a request need not compute: the interface between admission and its sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvferry.connector.bids import Bid, Bidding
from kvferry.connector.decisions import MissReason, SourceMiss
from kvferry.connector.engine import Request
from kvferry.connector.load import Load
from kvferry.connector.load_results import GroupBytes
from kvferry.connector.messages import Report, StepOrders


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

    def bids(self, request: Request, local_tokens: int) -> Sequence[Bid]:
        """Return bids for tokens beyond the `local_tokens` that the engine has. May be called again."""

    def why_no_bid(self, request: Request, local_tokens: int) -> SourceMiss:
        """Return why the last `bids` were none."""

    def head(self, request: Request, local_tokens: int, alignment_tokens: int) -> Bid | None:
        """Return a bid for the beginning of a prefix whose rest another source has.

        It brings only layers that see all tokens. Called after `bids`, with the same arguments.

        Args:
            request: the request.
            local_tokens: tokens that the engine has.
            alignment_tokens: the beginning ends at a multiple of so many tokens.
        """

    def tail(self, request: Request, local_tokens: int, first: int) -> Bid | None:
        """Return a bid for the rest of a prefix, from token `first` on. Called as `head`."""

    def room(self, bid: Bid, blocks: int) -> bool:
        """Return whether a load that may hold `blocks` blocks past its deadline can begin now."""

    def begin(self, load: Load, request: Request) -> None:
        """Begin the load of a bid that was taken. Workers get `load` with the next orders."""

    def alignments(self, request_id: str) -> tuple[int, ...]:
        """Return tokens per group: content loaded for a request begins at a multiple of them."""

    def origin(self, load: Load) -> str:
        """Return the place that most of a load comes from: ``peer``, or a tier's name."""

    def loaded_bytes(self, load: Load, report: Report) -> tuple[GroupBytes, ...]:
        """Return the bytes that a load brought. Called before `forget`."""

    def failure_reason(self, load: Load, report: Report) -> MissReason:
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
