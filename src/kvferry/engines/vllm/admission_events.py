"""Events for what admission decides.

An error here is logged and changes no decision.
"""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any

from kvferry.cache.bids import Bid, Bidding
from kvferry.cache.policies import Policy
from kvferry.engines.vllm.compat.requests import own_hit
from kvferry.engines.vllm.meta import Report
from kvferry.engines.vllm.source import Load, Source
from kvferry.observe.events import (
    Arrived,
    Asked,
    Finished,
    Lack,
    LateBlocks,
    LoadBegan,
    LoadEnded,
    Miss,
    Outcome,
    Settled,
    Valued,
    Why,
)
from kvferry.observe.watch import Watch, harmless

OTHER_PART = "another part of the prefix has failed"
"""The reason for dropping a load whose request goes on."""
_LONGEST_HEADER = 512
"""Characters of a trace header that are kept."""
_OUTCOMES = {"ready": Outcome.READY, "failed": Outcome.FAILED, "expired": Outcome.EXPIRED}


class AdmissionEvents:
    """Makes events of admission's decisions, and leaves out repetitions. Decides nothing."""

    def __init__(self, watch: Watch, policy: Policy) -> None:
        """Begin.

        Args:
            watch: receives the events.
            policy: values bids.
        """
        self._watch, self._policy = watch, policy
        self._asked: dict[str, tuple[object, Asked]] = {}
        self._unserved: dict[str, Any] = {}
        self._late = 0

    @harmless
    def arrived(self, request: Any, sources: Sequence[Source], others: Sequence[Source]) -> None:
        """Tell that a request came in; `sources` may serve it, `others` may not."""
        declined = tuple(lack for source in others if (lack := source.declined(request)) is not None)
        names = tuple(source.name for source in sources)
        now, tokens = time.monotonic(), int(request.num_tokens)
        # W3C: a tracestate of 512 characters must be passed on, a longer one need not.
        headers = tuple(
            (name, value)
            for name, value in (request.trace_headers or {}).items()
            if len(value) <= _LONGEST_HEADER
        )
        self._watch.tell(Arrived(request.request_id, now, tokens, names, declined, headers))

    @harmless
    def asked(
        self,
        request: Any,
        sources: Sequence[Source],
        bidding: Bidding,
        have: int,
        offers: Sequence[tuple[Source, Bid]],
        best: Bid | None,
    ) -> None:
        """Tell what sources bid, unless they bid the same last time."""
        now = (have, [bid for _, bid in offers], best, bidding.spent)
        last = self._asked.get(request.request_id)
        if last is not None and last[0] == now:
            return
        rest = request.num_tokens - have
        bids = tuple(self._valued(source, bid, bidding, rest) for source, bid in offers)
        silent = [source for source in sources if not any(of is source for of, _ in offers)]
        event = Asked(
            request.request_id,
            time.monotonic(),
            have,
            bids,
            self._policy.value(None, rest),
            tuple(source.lack(request, have) for source in silent),
            best,
            _why(bids, bidding, best),
        )
        self._asked[request.request_id] = now, event
        self._watch.tell(event)

    @harmless
    def not_asked(self, request: Any, sources: Sequence[Source], have: int, miss: Miss, detail: str) -> None:
        """Tell why nothing may be loaded whatever sources have, unless it was told last time."""
        last = self._asked.get(request.request_id)
        if last is not None and last[0] == (have, miss):
            return
        event = Asked(
            request.request_id,
            time.monotonic(),
            have,
            (),
            self._policy.value(None, request.num_tokens - have),
            tuple(Lack(source.name, miss, detail=detail) for source in sources),
            None,
            Why.SKIPPED if miss is Miss.SKIPPED else Why.NOTHING,
        )
        self._asked[request.request_id] = (have, miss), event
        self._watch.tell(event)

    @harmless
    def no_room(self, request_id: str, have: int) -> None:
        """Tell that there was no room for the chosen load, and that the request does not wait for it."""
        _, last = self._asked[request_id]
        now = time.monotonic()
        event = replace(last, at=now, have=have, chosen=None, why=Why.NO_ROOM)
        self._asked[request_id] = None, event
        self._watch.tell(event)

    @harmless
    def began(self, source: Source, load: Load) -> None:
        """Tell that a load was ordered."""
        bid, span = load.bid, load.span
        self._unserved.pop(load.request_id, None)
        self._watch.tell(
            LoadBegan(
                load.request_id,
                load.began,
                load.key,
                source.name,
                bid.source,
                bid.parts,
                span.begins,
                span.ends,
                load.attempt,
            )
        )

    @harmless
    def ended(self, source: Source, load: Load, whole: Report, *, wanted: bool) -> None:
        """Tell how a load ended that all workers have reported; `wanted` if its request still waits."""
        now, failed = time.monotonic(), whole.failure is not None
        blame = source.blame(load, whole) if failed and wanted else None
        moved = source.brought(load, whole)
        self._watch.tell(
            LoadEnded(
                load.request_id,
                now,
                load.key,
                source.name,
                _OUTCOMES[whole.outcome] if wanted else Outcome.DROPPED,
                blame,
                (whole.failure or "") if wanted else OTHER_PART if load.given_up else "",
                now - load.began,
                () if failed else moved,
                whole.pages,
                whole.descriptors,
                whole.plan_seconds,
                whole.transfer_seconds,
                whole.check_seconds,
            )
        )

    @harmless
    def settled(self, request_id: str, at_hand: int, tokens: int) -> None:
        """Tell that the engine goes on with a request that was loaded."""
        self._watch.tell(Settled(request_id, time.monotonic(), at_hand, tokens))

    @harmless
    def unserved(self, request: Any) -> None:
        """Note a request that no source loads; `scheduled` tells what it goes on with.

        Until then another connector may load it without telling anyone.
        """
        self._unserved[request.request_id] = request

    @harmless
    def scheduled(self, requests: Container[str]) -> None:
        """Tell that the engine goes on with those of these requests that no source has loaded."""
        for name in [name for name in self._unserved if name in requests]:
            request = self._unserved.pop(name)
            own, last = own_hit(request), self._asked.get(name)
            if own is None:
                own = 0 if last is None else last[1].have
            at_hand = request.num_computed_tokens
            self._watch.tell(
                Settled(name, time.monotonic(), at_hand, request.num_tokens, max(0, at_hand - own))
            )

    @harmless
    def finished(self, request_id: str) -> None:
        """Tell that a request has ended."""
        self._asked.pop(request_id, None)
        self._unserved.pop(request_id, None)
        self._watch.tell(Finished(request_id, time.monotonic()))

    @harmless
    def late(self, blocks: int) -> None:
        """Tell how many blocks late loads hold, if the number has changed."""
        if blocks != self._late:
            self._late = blocks
            self._watch.tell(LateBlocks(time.monotonic(), blocks))

    def _valued(self, source: Source, bid: Bid, bidding: Bidding, rest: int) -> Valued:
        struck = bidding.why(bid.source) or ""
        return Valued(source.name, bid, 0.0 if struck else self._policy.value(bid, rest), struck)


def _why(bids: Sequence[Valued], bidding: Bidding, best: Bid | None) -> Why:
    """Return why `best` was chosen, or why nothing was."""
    if best is not None:
        return Why.LOOKING if best.looking else Why.BEST
    if bids and bidding.spent:
        return Why.ATTEMPTS
    if any(not one.struck and not one.bid.looking for one in bids):
        return Why.COMPUTING
    return Why.NOTHING
