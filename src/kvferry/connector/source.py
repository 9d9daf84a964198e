"""The interface between admission and the sources of KV: peers and tiers.

A source offers the KV of a prompt prefix as a *bid*. Admission takes the best bid and has its source load it.
"""

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
    """A source of KV for prompt prefixes. The engine's thread calls it, so no method may block.

    Attributes:
        name: name of the source in metrics.
    """

    name: str

    def arrived(self, request: Request, bidding: Bidding) -> bool:
        """Return whether this source may be able to load KV for a new request. If so, remember the request.

        Args:
            request: the request.
            bidding: excluded sources and remaining attempts of the request.
        """

    def declined(self, request: Request) -> SourceMiss | None:
        """Return why this source cannot serve a request; None if there is no reason to report.

        Args:
            request: request for which `arrived` returned False.
        """

    def bids(self, request: Request, local_tokens: int) -> Sequence[Bid]:
        """Return this source's offers to load tokens beyond those that the engine has; empty if it has none.

        May be called repeatedly for a request.

        Args:
            request: the request.
            local_tokens: number of the request's tokens in the engine's own prefix cache.
        """

    def why_no_bid(self, request: Request, local_tokens: int) -> SourceMiss:
        """Return why the last call of `bids`, with the same arguments, returned no offer.

        Args:
            request: the request.
            local_tokens: number of the request's tokens in the engine's own prefix cache.
        """

    def head(self, request: Request, local_tokens: int, alignment_tokens: int) -> Bid | None:
        """Return an offer to load only the start of a prefix, if another source loads the rest.

        Return None if this source makes no such offer. The load covers only layers that attend to all tokens.
        Called after `bids`, for the same request.

        Args:
            request: the request.
            local_tokens: number of the request's tokens in the engine's own prefix cache, the same number as
                in the call of `bids`.
            alignment_tokens: alignment of the offer's end in tokens. The offer must end at a multiple of this
                number, counted from the start of the prompt.
        """

    def tail(self, request: Request, local_tokens: int, first: int) -> Bid | None:
        """Return an offer to load the rest of a prefix, if another source loads its start.

        Return None if this source makes no such offer. Called after `bids`, for the same request.

        Args:
            request: the request.
            local_tokens: number of the request's tokens in the engine's own prefix cache, the same number as
                in the call of `bids`.
            first: position of the first token of the rest.
        """

    def has_room(self, bid: Bid, blocks: int) -> bool:
        """Return whether this source may begin a load now.

        A source may refuse if its loads, including those past their deadline, would hold too many blocks.

        Args:
            bid: the source's offer that was chosen.
            blocks: maximum number of blocks that the new load may hold.
        """

    def begin(self, load: Load, request: Request) -> None:
        """Begin to load KV from this source.

        The workers are told of `load` in the scheduler's message for the next engine step.

        Args:
            load: the load.
            request: the request that waits for the load.
        """

    def alignments(self, request_id: str) -> tuple[int, ...]:
        """Return the alignment of loaded KV in tokens, for each KV cache group.

        In each group, the KV that is loaded for the request begins at a multiple of the alignment, possibly
        in the middle of a block.

        Args:
            request_id: id of the request.
        """

    def origin(self, load: Load) -> str:
        """Return the origin of a load's KV: ``peer``, or the name of the slowest tier that the load uses."""

    def loaded_bytes(self, load: Load, report: Report) -> tuple[GroupBytes, ...]:
        """Return the number of bytes that a load has copied, per KV cache group. Called before `forget`.

        Args:
            load: the load.
            report: merged report of all workers about the load.
        """

    def failure_reason(self, load: Load, report: Report) -> MissReason:
        """Return the reason why a load has failed. Called before `forget`.

        Args:
            load: the load.
            report: merged report of all workers about the load.
        """

    def ended(self, load: Load, report: Report) -> None:
        """Handle the end of a load that all workers have reported.

        If the load has failed, do not use its peer, or the tiers that were too slow, for this request again.

        Args:
            load: the load.
            report: merged report of all workers about the load.
        """

    def forget(self, load: Load) -> None:
        """Forget a load that all workers have reported, even if no request waits for it any more."""

    def dropped(self, load: Load) -> None:
        """Cancel a load in flight because no request waits for it any more, if this source can cancel loads.

        Its request has ended, or another load of the same attempt has failed. The workers still report the
        load's end.

        Args:
            load: the load.
        """

    def settled(self, request_id: str) -> None:
        """Release the leases on peers' blocks that this source holds for a request that needs no more loads.

        Called when the request's loads have succeeded, when the engine computes the prompt itself, or when
        the request has ended.

        Args:
            request_id: id of the request.
        """

    def finished(self, request_id: str) -> None:
        """Forget a request that has ended."""

    def hand_over(self, orders: StepOrders) -> None:
        """Add the work of this source to the message that tells the workers what to do in the coming step.

        Args:
            orders: message to the workers. This object is mutated.
        """
