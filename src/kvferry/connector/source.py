"""The interface between admission and the sources of KV: peers and tiers.

A source offers the KV of a prompt prefix as a *bid*. Admission takes the best bid and has its source load it.
The source answers with a *feed*, which brings the KV to the workers in parts as it becomes available.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry.connector.bids import Bid, Bidding
from kvferry.connector.engine import Request
from kvferry.connector.events import MissReason, SourceMiss
from kvferry.connector.load import GroupBytes, Load
from kvferry.connector.messages import LoadPart, Report


def _no_part(_: int) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a source that was asked for a request. It is of use until the source is asked again.

    Attributes:
        bids: the source's offers; empty if it has none.
        why_none: function that returns why there are no bids. It may be slow, so it is called only if the
            reason is told.
        head: function that returns an offer to load only the start of the prefix, if another source loads the
            rest; None if there is none. The offer covers only layers that attend to all tokens, and ends at a
            multiple of the function's argument, counted in tokens from the start of the prompt.
        tail: function that returns an offer to load the rest of the prefix, if another source loads its
            start; None if there is none. Its argument is the position of the first token of the rest.
    """

    bids: Sequence[Bid]
    why_none: Callable[[], SourceMiss]
    head: Callable[[int], Bid | None] = _no_part
    tail: Callable[[int], Bid | None] = _no_part


class Feed(Protocol):
    """What a source does for one load, from its beginning until all workers have reported it.

    The engine's thread calls it, so no method may block. Each report is the merged one of all workers.
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
        """Return the number of bytes that the load has copied, per KV cache group."""

    def miss(self, report: Report) -> MissReason:
        """Return the reason why the load has failed."""

    def ended(self, report: Report, *, wanted: bool) -> None:
        """Handle the end of the load, which all workers have reported. No other method is called any more.

        If it has failed, do not use its peer, or the tiers that were too slow, for its request again.

        Args:
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
            bidding: excluded sources and remaining attempts of the request.
        """

    def declined(self, request: Request) -> SourceMiss | None:
        """Return why this source cannot serve a request; None if there is no reason to report.

        Args:
            request: request for which `arrived` returned False.
        """

    def ask(self, request: Request, local_tokens: int) -> Answer:
        """Return what this source offers to load beyond the tokens that the engine has.

        May be called repeatedly for a request.

        Args:
            local_tokens: number of the request's tokens in the engine's own prefix cache.
        """

    def has_room(self, bid: Bid, blocks: int) -> bool:
        """Return whether this source may begin a load now.

        A source may refuse if its loads, including those past their deadline, would hold too many blocks.

        Args:
            blocks: maximum number of blocks that the new load may hold.
        """

    def begin(self, load: Load, request: Request) -> Feed:
        """Begin to load KV from this source. Return what brings it to the workers, part by part."""

    def alignments(self, request_id: str) -> tuple[int, ...]:
        """Return the alignment of loaded KV in tokens, for each KV cache group.

        In each group, the KV that is loaded for the request begins at a multiple of the alignment, possibly
        in the middle of a block.
        """

    def settled(self, request_id: str) -> None:
        """Release the leases on peers' blocks that this source holds for a request that needs no more loads.

        Called when the request's loads have succeeded, when the engine computes the prompt itself, or when
        the request has ended.
        """

    def finished(self, request_id: str) -> None:
        """Forget a request that has ended."""
