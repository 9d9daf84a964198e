"""The interface between admission and the sources of KV: peers and tiers.

A source offers the KV of a prompt prefix as a *bid*. Admission takes the best bid and has its source load it.
The source answers with a *feed*, which brings the KV to the workers in parts as it becomes available.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvferry.connector.bids import Bid, Bidding
from kvferry.connector.decisions import MissReason, SourceMiss
from kvferry.connector.engine import Request
from kvferry.connector.load import Load
from kvferry.connector.load_results import GroupBytes
from kvferry.connector.messages import LoadPart, Report


class Feed(Protocol):
    """What a source does for one load, from its beginning until all workers have reported it.

    The engine's thread calls it, so no method may block.
    """

    @property
    def origin(self) -> str:
        """The place that the KV comes from: ``peer``, or the name of the slowest tier that the load uses."""

    def next_parts(self) -> Sequence[LoadPart]:
        """Return what the workers do for the load in the coming step.

        Nothing follows a part that is the last, or that says why no more will come.
        """

    def drop(self) -> None:
        """Bring nothing more, because the request has ended, or another load of its attempt has failed.

        What is in flight cannot be cancelled: the workers still report the load's end.
        """

    def moved(self, report: Report) -> tuple[GroupBytes, ...]:
        """Return the number of bytes that the load has copied, per KV cache group.

        Args:
            report: merged report of all workers about the load.
        """

    def miss(self, report: Report) -> MissReason:
        """Return the reason why the load has failed.

        Args:
            report: merged report of all workers about the load.
        """

    def ended(self, report: Report, *, wanted: bool) -> None:
        """Handle the end of the load, which all workers have reported. No other method is called any more.

        If it has failed, do not use its peer, or the tiers that were too slow, for its request again.

        Args:
            report: merged report of all workers about the load.
            wanted: False if no request waits for the load any more, or it has failed in vain.
        """


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

    def begin(self, load: Load, request: Request) -> Feed:
        """Begin to load KV from this source. Return what brings it to the workers, part by part.

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

    def settled(self, request_id: str) -> None:
        """Release the leases on peers' blocks that this source holds for a request that needs no more loads.

        Called when the request's loads have succeeded, when the engine computes the prompt itself, or when
        the request has ended.

        Args:
            request_id: id of the request.
        """

    def finished(self, request_id: str) -> None:
        """Forget a request that has ended."""
