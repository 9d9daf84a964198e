"""Events about the decisions of admission.

An error in this module is logged and affects no decision.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence, Sized
from dataclasses import replace

from kvferry.connector.choosing import Policy
from kvferry.connector.engine import Request
from kvferry.connector.events import (
    Arrived,
    DecisionReason,
    EventStream,
    Finished,
    LateBlocks,
    LoadEnded,
    MissReason,
    Scheduled,
    SourceMiss,
    SourcesAsked,
    ValuedBid,
    log_errors,
)
from kvferry.connector.load import Bid, Bidding, LoadOutcome
from kvferry.connector.messages import Report
from kvferry.connector.peers.offer import has_offer
from kvferry.connector.room import LocalPrefix
from kvferry.connector.source import Answer, Source
from kvferry.connector.transfer import RunningLoad

OTHER_PART = "another part of the prefix has failed"
"""Reason for dropping a load when another load of the same attempt has failed."""
_LONGEST_HEADER = 512
"""Maximum length of a trace header in characters. Longer headers are left out."""
_OUTCOMES = {"ready": LoadOutcome.READY, "failed": LoadOutcome.FAILED, "expired": LoadOutcome.EXPIRED}


class AdmissionEvents:
    """Emits events about the choice of a KV source for each request, and about the loads that follow.

    A choice that repeats the last one for the same request emits no event. This class makes no decision
    itself.
    """

    def __init__(self, events: EventStream, policy: Policy, clock: Callable[[], float]) -> None:
        self._events, self._policy, self._clock = events, policy, clock
        self._asked: dict[str, tuple[object, SourcesAsked]] = {}
        self._unserved: dict[str, Request] = {}
        self._late = 0

    @log_errors
    def arrived(self, request: Request, sources: Sequence[Source], others: Sequence[Source]) -> None:
        """Emit an `Arrived` event for a new request."""
        declined = tuple(lack for source in others if (lack := source.declined(request)) is not None)
        names = tuple(source.name for source in sources)
        now, tokens = self._clock(), int(request.num_tokens)
        # W3C: a tracestate of 512 characters must be passed on, a longer one need not.
        headers = tuple(
            (name, value) for name, value in request.trace_headers.items() if len(value) <= _LONGEST_HEADER
        )
        self._events.emit(
            Arrived(
                request.request_id,
                now,
                tokens=tokens,
                sources=names,
                declined=declined,
                ticket=has_offer(request.kv_transfer_params),
                trace_headers=headers,
            )
        )

    @log_errors
    def asked(
        self,
        request: Request,
        answers: Sequence[tuple[Source, Answer]],
        *,
        bidding: Bidding,
        prefix: LocalPrefix,
        local_tokens: int,
        offers: Sequence[tuple[Source, Bid]],
        best: Bid | None,
    ) -> None:
        """Emit a `SourcesAsked` event with all bids and the chosen one.

        Emit nothing if the bids, the choice, the prefix and whether an attempt is left are the same as in the
        request's last event.

        Args:
            local_tokens: number of tokens of the prefix after which the offered tokens begin.
            best: None if the engine computes the tokens.
        """
        now = (prefix, local_tokens, [bid for _, bid in offers], best, bidding.spent)
        last = self._asked.get(request.request_id)
        if last is not None and last[0] == now:
            return
        missing_tokens = request.num_tokens - local_tokens
        bids = tuple(self._value_bid(source, bid, bidding, missing_tokens) for source, bid in offers)
        compute_value = self._policy.value(None, request.num_tokens - prefix.resumable_tokens)
        silent = [answer for source, answer in answers if not any(of is source for of, _ in offers)]
        event = SourcesAsked(
            request.request_id,
            self._clock(),
            local_tokens=prefix.tokens,
            resumable_tokens=prefix.resumable_tokens,
            bids=bids,
            compute_value=compute_value,
            misses=tuple(answer.why_none() for answer in silent),
            chosen=best,
            why=_why(bids, bidding, best, compute_value),
        )
        self._asked[request.request_id] = now, event
        self._events.emit(event)

    @log_errors
    def not_asked(
        self, request: Request, sources: Sequence[Source], local_tokens: int, miss: MissReason, detail: str
    ) -> None:
        """Emit a `SourcesAsked` event that says why no source was asked, unless the last one did."""
        last = self._asked.get(request.request_id)
        if last is not None and last[0] == (local_tokens, miss):
            return
        event = SourcesAsked(
            request.request_id,
            self._clock(),
            local_tokens=local_tokens,
            resumable_tokens=local_tokens,
            bids=(),
            compute_value=self._policy.value(None, request.num_tokens - local_tokens),
            misses=tuple(SourceMiss(source.name, miss, detail=detail) for source in sources),
            chosen=None,
            why=DecisionReason.SKIPPED if miss is MissReason.SKIPPED else DecisionReason.NOTHING,
        )
        self._asked[request.request_id] = (local_tokens, miss), event
        self._events.emit(event)

    @log_errors
    def no_room(self, request_id: str, local_tokens: int) -> None:
        """Emit a `SourcesAsked` event: a prompt is computed because too few blocks are free to load it."""
        _, last = self._asked[request_id]
        now = self._clock()
        event = replace(
            last,
            at=now,
            local_tokens=local_tokens,
            resumable_tokens=min(local_tokens, last.resumable_tokens),
            chosen=None,
            why=DecisionReason.NO_ROOM,
        )
        self._asked[request_id] = None, event
        self._events.emit(event)

    @log_errors
    def began(self, one: RunningLoad) -> None:
        """Emit a `LoadBegan` event for a load that has begun."""
        self._unserved.pop(one.load.request_id, None)
        self._events.emit(one.began)

    @log_errors
    def ended(self, one: RunningLoad, report: Report, *, unwanted: str | None) -> None:
        """Emit a `LoadEnded` event for a load that all workers have reported.

        Args:
            unwanted: None if the request still waits for the load. Otherwise the reason why it does not;
            empty if the
                reason is not known.
        """
        failed = report.failure is not None
        miss = one.feed.miss(report) if failed and unwanted is None else None
        moved = one.feed.moved(report)
        self._events.emit(
            LoadEnded(
                one.load.request_id,
                self._clock(),
                began=one.began,
                outcome=_OUTCOMES[report.outcome] if unwanted is None else LoadOutcome.DROPPED,
                miss=miss,
                failure=(report.failure or "") if unwanted is None else unwanted,
                moved=() if failed else moved,
                figures=report.figures,
            )
        )

    @log_errors
    def settled(self, request_id: str, available: int, tokens: int, loads: Sequence[RunningLoad]) -> None:
        """Emit a `Scheduled` event for a request whose loads have succeeded.

        Args:
            available: number of tokens whose KV the engine has now, from its prefix cache or from the loads.
            tokens: number of all tokens of the request.
        """
        # Computing the last token gives the next one, so an engine computes it even if its KV was loaded.
        cached, began = min(available, tokens - 1), tuple(one.began for one in loads)
        self._events.emit(Scheduled(request_id, self._clock(), cached, tokens, loads=began))

    @log_errors
    def unserved(self, request: Request) -> None:
        """Remember a request for which no source loads KV, so that `scheduled` emits an event for it.

        The event is emitted only when the engine computes the request. Until then another connector of the
        engine may still load tokens of the request; the event counts these tokens.
        """
        self._unserved[request.request_id] = request

    @property
    def agenda(self) -> tuple[Sized, ...]:
        return (self._unserved,)

    @log_errors
    def scheduled(self, requests: Container[str]) -> None:
        """Emit a `Scheduled` event for each of these requests that was passed to `unserved` before."""
        for name in [name for name in self._unserved if name in requests]:
            request = self._unserved.pop(name)
            own, last, available = request.own_hit, self._asked.get(name), request.num_computed_tokens
            if own is None:
                own = available if last is None else last[1].local_tokens
            self._events.emit(
                Scheduled(name, self._clock(), available, request.num_tokens, max(0, available - own))
            )

    @log_errors
    def finished(self, request_id: str) -> None:
        """Emit a `Finished` event for a request that has ended, and forget the request."""
        self._asked.pop(request_id, None)
        self._unserved.pop(request_id, None)
        self._events.emit(Finished(request_id, self._clock()))

    @log_errors
    def late(self, blocks: int) -> None:
        """Emit a `LateBlocks` event if the number of blocks that late loads hold has changed."""
        if blocks != self._late:
            self._late = blocks
            self._events.emit(LateBlocks(self._clock(), blocks))

    def _value_bid(self, source: Source, bid: Bid, bidding: Bidding, missing_tokens: int) -> ValuedBid:
        excluded = bidding.exclusion_reason(bid.source) or ""
        return ValuedBid(
            source.name, bid, 0.0 if excluded else self._policy.value(bid, missing_tokens), excluded
        )


def _why(
    bids: Sequence[ValuedBid], bidding: Bidding, best: Bid | None, compute_value: float
) -> DecisionReason:
    """Return why admission chose a bid, or why the engine computes the prompt (`best` is None)."""
    if best is not None and best.looking:
        return DecisionReason.LOOKING
    least = max((one.value for one in bids if one.bid is best), default=compute_value)
    passed_over = any(one.bid.looking and one.value > least for one in bids)
    if best is not None:
        return DecisionReason.ANSWERED if passed_over else DecisionReason.BEST
    if bids and bidding.spent:
        return DecisionReason.ATTEMPTS
    if any(not one.excluded and not one.bid.looking for one in bids):
        return DecisionReason.COMPUTING
    return DecisionReason.UNANSWERED if passed_over else DecisionReason.NOTHING
