"""Admission: choose the source that loads a request's KV, follow its loads, and try again after a failure.

Each request that a source may be able to serve goes through the phases drawn in `request_phases`. No request
is admitted again forever, because loads that cannot help are not begun and attempts are capped (`bids`).

Two sources may load one prefix together, one its start and the other its rest (`load_plans`). The request
then waits for two loads. If one of them fails on any worker, admission drops the other and does not exclude
its source. The request goes on at once. Bytes that are still in flight arrive in blocks that no longer belong
to the request.

The engine's own prefix may need a load before it can be used (`local_prefix`). Admission then prefers loads
that begin where this prefix ends. If there is none, but a source has a shorter prefix, admission shortens the
engine's own prefix once, and the engine asks again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Container, Sequence, Sized
from dataclasses import dataclass, field

from kvferry.connector.admission_events import OTHER_PART, AdmissionEvents
from kvferry.connector.choosing import BidChooser
from kvferry.connector.engine import CacheGroup, PrefixCache, Request, RequestBlocks
from kvferry.connector.events import EventStream
from kvferry.connector.load import Bid, Bidding
from kvferry.connector.messages import StepOrders, StepReports
from kvferry.connector.part_blocks import PartBlocks
from kvferry.connector.request_phases import AdmitAction, RequestPhase, RequestPhases, RequestState
from kvferry.connector.room import Headroom, LocalPrefix, last_boundary_before, must_compute
from kvferry.connector.source import Answer, LoadPlan, Source, common_alignment, load_plans
from kvferry.connector.transfer import RunningLoad, RunningLoads, TransferBook
from kvferry.planning.select import LoadSpan


@dataclass(slots=True, kw_only=True)
class _RequestState(RequestState[LoadPlan]):
    """The state of one request whose KV a source may be able to load.

    Attributes:
        sources: sources that may be able to serve the request.
        loads: loads of the request that not all workers have reported yet.
        loaded: loads of the current attempt that have succeeded.
        broken: True if a load of the current attempt has failed.
        shortened: True if the engine's own prefix of the request was shortened since the request was last
            admitted. It is then not shortened again, so that the request is not put off for ever.
    """

    sources: tuple[Source, ...]
    loads: list[RunningLoad] = field(default_factory=list)
    loaded: list[RunningLoad] = field(default_factory=list)
    broken: bool = False
    shortened: bool = False


class Admission:
    """Chooses the source that loads each request's KV, starts the load, and tries another source if it fails.

    Only the engine's thread calls it.

    Attributes:
        loads: loads that may still write to their blocks.
        admitted: number of times that the engine has allocated blocks to a waiting request.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        *,
        loads: TransferBook[RunningLoad],
        parts: PartBlocks,
        headroom: Headroom,
        attempts: int,
        timeout_seconds: float,
        sources: Sequence[Source],
        chooser: BidChooser,
        events: EventStream,
        prefix_cache: PrefixCache | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin without requests.

        Args:
            loads: loads that may still write to their blocks. The sources share this record.
            attempts: maximum number of attempts to load one request's prefix.
            sources: all sources of KV, in the order in which they are asked. Of equally good offers, that of
            the first
                source is taken.
            prefix_cache: the engine's prefix cache, if it shares attention blocks where it lacks recurrent
            state; None
                if the engine can use its own prefix without a load.
        """
        self.loads, self._prefix_cache, self.admitted = loads, prefix_cache, 0
        self._parts, self._clock = parts, clock
        self._phases = RequestPhases(chooser, headroom, clock)
        self._attempts = attempts
        self._running = RunningLoads(groups, book=loads, timeout_seconds=timeout_seconds, clock=clock)
        self._sources, self._chooser = tuple(sources), chooser
        self._events = AdmissionEvents(events, chooser.policy, clock)
        self._alignment_tokens = common_alignment((group.kind, group.block_tokens) for group in groups)
        self._known: dict[str, _RequestState] = {}

    def __len__(self) -> int:
        """Return the number of unfinished requests whose KV at least one source may be able to load."""
        return len(self._known)

    def on_new_request(self, request: Request) -> None:
        """Ask every source whether it may be able to load KV of a new request, and remember the answers."""
        bidding = Bidding(self._attempts)
        sources = tuple(source for source in self._sources if source.arrived(request, bidding))
        self._events.arrived(request, sources, [one for one in self._sources if one not in sources])
        if sources:
            self._known[request.request_id] = _RequestState(bidding=bidding, sources=sources)

    def matched(self, request: Request, local_tokens: int) -> int | None:
        """Return the number of tokens to load for a request that the engine wants to admit; 0 for no load.

        Return None if the engine must ask again in a later step. If the result is 0, an engine with a
        `PrefixCache` continues from `PrefixCache.resumable_tokens`.

        Args:
            local_tokens: number of tokens of the request in the engine's own prefix cache.
        """
        if self._parts.evict():
            return None  # the prefix that the engine has just found for this request may contain these blocks
        known = self._known.get(request.request_id)
        action = AdmitAction.KEEP_LOADING if known is None else self._phases.next_action(known)
        if known is None or action is AdmitAction.KEEP_LOADING:
            return 0
        if action is AdmitAction.SET_ASIDE:
            return None
        if action is AdmitAction.COMPUTE:
            self._events.no_room(request.request_id, local_tokens)
            return 0
        prefix = LocalPrefix.of(self._prefix_cache, request, local_tokens)
        if (why := must_compute(request, prefix.resumable_tokens)) is not None:
            known.taken = None
            self._events.not_asked(request, known.sources, prefix.resumable_tokens, *why)
            return 0
        return self._best(known, request, prefix)

    def awaited(self, request_id: str) -> Bid | None:
        """Return the bid that a request waits for; None if `matched` has not put it off for a bid.

        Its source is still looking up its KV, or too few blocks are free.
        """
        known = self._known.get(request_id)
        return None if known is None else known.awaited

    def allocated(self, request: Request, blocks: RequestBlocks, load_tokens: int) -> None:
        """Begin the loads of a request for which the engine has just allocated blocks.

        Args:
            blocks: all blocks of the request. The loads write into them.
            load_tokens: number of tokens to load, as `matched` returned it last; 0 for no load.
        """
        self.admitted += 1
        known = self._known.get(request.request_id)
        if known is None:
            self._events.unserved(request)
            return
        if known.phase is RequestPhase.SERVED:
            self._parts.on_resumed(request.request_id)
        if known.phase is not RequestPhase.OPEN:
            return
        self._parts.forget(request.request_id)  # left from an earlier admission
        proposed, known.shortened = known.taken, False
        taken = self._phases.admit(known, load_tokens)
        if taken is None:
            if proposed is not None and known.crowded:
                self._events.no_room(request.request_id, proposed[1])
            self._settle(request.request_id, known)
            self._events.unserved(request)
            return
        plan, local_tokens = taken
        known.loaded, known.broken = [], False
        self._phases.wait(known, request, local_tokens + load_tokens)
        parts = plan.parts(local_tokens, load_tokens, request.num_tokens)
        known.loads += (begun := self._running.begin(request, blocks, parts))
        for one in begun:
            self._events.began(one)
        last = begun[-1]
        self._parts.begin(
            request, last.load.tables, last.load.span, last.source.alignments(request.request_id)
        )

    def origins(self, request_id: str) -> Counter[str]:
        """Return the number of tokens that are being loaded for a request, by `Feed.origin`."""
        found = Counter[str]()
        for one in self._known[request_id].loads:
            found[one.feed.origin] += one.load.span.ends - one.load.span.begins
        return found

    def finished(self, request_id: str) -> None:
        """Forget a request that has ended. The blocks that its loads may still write to stay pinned."""
        self._phases.forget(request_id)
        known = self._known.pop(request_id, None)
        if known is None:
            self._events.finished(request_id)
            return
        for one in known.loads:
            one.late = True
            one.feed.drop()
        self._settle(request_id, known)
        for source in known.sources:
            source.finished(request_id)
        self._events.finished(request_id)
        self._events.late(self.loads.late_blocks())

    @property
    def agenda(self) -> tuple[Sized, ...]:
        """Containers that are all empty if a step needs no calls of `scheduled` and `hand_over`."""
        return (
            *self._running.agenda,
            *self._phases.agenda,
            *self._events.agenda,
            *self._parts.agenda,
        )

    def scheduled(self, requests: Container[str]) -> None:
        """Record which requests the engine's coming step computes. They no longer wait for loads."""
        self._phases.scheduled(requests)
        self._events.scheduled(requests)

    def hand_over(self, orders: StepOrders) -> None:
        """Add to `orders` what the workers do for loads in the coming step, and which loads to give up."""
        self._parts.end_pass()
        self._running.take_orders(orders)

    def take_reports(self, reports: StepReports) -> None:
        """Process the workers' reports, and unpin the KV blocks that no load can write to any more."""
        bad = []
        for key, report in reports.reports.items():
            if key not in self.loads:
                continue  # chunks were copied
            if report.failure is not None:
                bad.append(self.loads[key])
            if (one := self.loads.add_report(key, report)) is not None:
                self._ended(one)
        for one in bad:
            if one.load.bid.growing and not one.fed:
                one.feed.drop()  # other workers need not wait for the rest of it
            if not one.given_up:
                self._drop_sibling_loads(one)
        self.loads.release(reports)
        self._events.late(self.loads.late_blocks())

    def _ended(self, one: RunningLoad) -> None:
        """Take in the end of a load that all workers have reported."""
        assert one.report is not None
        load, merged = one.load, one.report
        self._running.ended(one)
        known = self._known.get(load.request_id)
        wanted = known is not None and one in known.loads
        in_vain = one.given_up and merged.failure is not None
        unwanted = None if wanted and not in_vain else OTHER_PART if one.given_up else ""
        self._events.ended(one, merged, unwanted=unwanted)
        one.feed.ended(merged, wanted=wanted and not in_vain)
        if known is None or not wanted:
            return
        known.loads.remove(one)
        if merged.failure is None:
            known.loaded.append(one)
        else:
            known.broken = True
            self._parts.forget(load.request_id)
        # A late load takes at least this long. A part is not timed: windows and states dominate its time.
        if load.loads == 1 and not load.bid.growing and (merged.failure is None or merged.late):
            self._chooser.speeds.record_load(load.bid.parts, self._clock() - load.began)
        if known.loads:
            return
        self._phases.ended(known, load.request_id, failed=known.broken)
        if known.broken:
            return
        self._settle(load.request_id, known)
        self._events.settled(load.request_id, load.span.total, load.span.prompt, known.loaded)

    def _drop_sibling_loads(self, failed: RunningLoad) -> None:
        """Drop the loads of the other parts of a prefix after the load of one part has failed.

        Their sources are not excluded, because these loads have not failed.
        """
        known = self._known.get(failed.load.request_id)
        for one in known.loads if known is not None else ():
            if one is not failed and one.load.attempt == failed.load.attempt and not one.given_up:
                self._running.give_up(one, OTHER_PART)
                one.feed.drop()

    def _best(self, known: _RequestState, request: Request, prefix: LocalPrefix) -> int | None:
        """Choose the best plan for a request; return the number of tokens to load, 0 to compute the prompt.

        Return None while the request waits for free blocks, or for a source that is still looking up its KV.
        Also return None if the engine must look its own prefix up again, because it was shortened.
        """
        local_tokens = prefix.tokens
        answers, plans, best = self._ask(known, request, prefix, local_tokens)
        if best is None and prefix.needs_load and not known.shortened:
            local_tokens = prefix.resumable_tokens
            answers, plans, best = self._ask(known, request, prefix, local_tokens)
        self._events.asked(
            request,
            answers,
            bidding=known.bidding,
            prefix=prefix,
            local_tokens=local_tokens,
            offers=[(plan.last, plan.bid) for plan in plans],
            best=None if best is None else best.bid,
        )
        if best is not None and local_tokens < prefix.tokens and not best.bid.looking:
            self._shorten(known, request, local_tokens + best.bid.tokens)
            return None
        return self._phases.propose(
            known, best, local_tokens, lambda plan: self._has_room(plan, request, local_tokens)
        )

    def _ask(
        self, known: _RequestState, request: Request, prefix: LocalPrefix, local_tokens: int
    ) -> tuple[list[tuple[Source, Answer]], list[LoadPlan], LoadPlan | None]:
        """Ask all sources for tokens after the first `local_tokens` tokens of a request.

        Return the answers, all plans to load such tokens, and the best plan; None if the engine computes the
        prompt. If `local_tokens` is less than all tokens of `prefix`, leave out plans for a longer prefix
        than `prefix`.
        """
        answers = [(source, source.ask(request, local_tokens)) for source in known.sources]
        found = load_plans(answers, local_tokens, self._alignment_tokens)
        plans = [plan for plan in found if not self._fills_block_partly(plan, request, local_tokens)]
        if local_tokens < prefix.tokens:
            plans = [plan for plan in plans if local_tokens + plan.bid.tokens <= prefix.tokens]
        best = self._phases.best(
            known, plans, request, local_tokens, resumable_tokens=prefix.resumable_tokens
        )
        return answers, plans, best

    def _shorten(self, known: _RequestState, request: Request, end: int) -> None:
        """Shorten the engine's own prefix of a request, so that a load up to `end` brings at least a token.

        The evicted block enters the prefix cache again when the request has loaded or computed its tokens.
        """
        assert self._prefix_cache is not None
        self._prefix_cache.shorten(request, last_boundary_before(end, self._alignment_tokens))
        known.shortened, known.taken = True, None

    def _has_room(self, plan: LoadPlan, request: Request, local_tokens: int) -> bool:
        """Return whether there are enough blocks to begin the loads of a plan now."""
        tokens, total = request.num_tokens, local_tokens + plan.bid.tokens
        return self._phases.headroom.fits(request.request_id, total, tokens) and all(
            source.has_room(bid, self._running.max_written_blocks(span))
            for source, bid, span in plan.parts(local_tokens, plan.bid.tokens, tokens)
        )

    def _fills_block_partly(self, plan: LoadPlan, request: Request, local_tokens: int) -> bool:
        """Return whether a plan must be refused because it would fill a block only in part (`whole_blocks`).

        Return False while a source of the plan is still looking up its KV, because the answer is not known
        yet.
        """
        span = LoadSpan(local_tokens, local_tokens + plan.bid.tokens, request.num_tokens)
        return not plan.bid.looking and self._parts.refuses(span, plan.last.alignments(request.request_id))

    def _settle(self, request_id: str, known: _RequestState) -> None:
        for source in known.sources:
            source.settled(request_id)
