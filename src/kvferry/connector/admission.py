"""Admission: choose the source that loads a request's KV, follow its loads, and try again after a failure.

Each time that the engine wants to admit a request, admission asks the sources (`Answer`), makes plans of what
they offer (`load_plans`), and chooses one (`BidChooser.choose`). Attempts are capped.

Two sources may load one prefix together, one its start and the other its rest. If one of the two loads fails
on any worker, admission drops the other and does not exclude its source. The request goes on at once. Bytes
that are still in flight arrive in blocks that no longer belong to the request.

The engine's own prefix may need a load before it can be used (`LocalPrefix`). Admission then prefers loads
that begin where this prefix ends. If there is none, but a source has a shorter prefix, admission shortens the
engine's own prefix once, and the engine asks again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence, Set as AbstractSet, Sized
from dataclasses import dataclass, field, replace

from kvferry.connector.bids import Bid
from kvferry.connector.blocks import Headroom, PartBlocks
from kvferry.connector.choosing import (
    BidChooser,
    Choice,
    LocalPrefix,
    RequestPhase,
    RequestState,
    last_boundary_before,
    must_compute,
)
from kvferry.connector.content import tenant_of_request
from kvferry.connector.engine import Block, CacheGroup, PrefixCache, Request
from kvferry.connector.events import (
    Arrived,
    DecisionReason,
    EventStream,
    Finished,
    LateBlocks,
    LoadBegan,
    LoadEnded,
    LoadOutcome,
    MissReason,
    Scheduled,
    SourceMiss,
    SourcesAsked,
    log_errors,
)
from kvferry.connector.messages import StepOrders, StepReports
from kvferry.connector.source import (
    Answer,
    LoadPlan,
    RunningLoad,
    RunningLoads,
    Source,
    common_alignment,
    load_plans,
)
from kvferry.planning.select import LoadSpan
from kvferry.tiers.tenants import Tenants
from kvferry.transport.offer import has_offer

_OTHER_PART = "another part of the prefix has failed"
"""Reason for dropping a load when another load of the same attempt has failed."""
_LONGEST_HEADER = 512
"""Maximum length of a trace header in characters. Longer headers are left out."""


@dataclass(slots=True, kw_only=True)
class _RequestState(RequestState):
    """The state of one request whose KV a source may be able to load."""

    sources: tuple[Source, ...]  # sources that may be able to serve the request
    plan: LoadPlan | None = None  # plan of the proposed bid
    # Loads of the request that not all workers have reported yet.
    loads: list[RunningLoad] = field(default_factory=list)
    # Loads of the current attempt that have succeeded.
    loaded: list[LoadBegan] = field(default_factory=list)
    broken: bool = False  # True if a load of the current attempt has failed
    # True if the engine's own prefix of the request was shortened since the request was last admitted. It is
    # then not shortened again, so that the request is not put off for ever.
    shortened: bool = False
    event: SourcesAsked | None = None  # the last event about the choice of a source; None before the first
    # Values that `event` shows. A choice that repeats them emits no event.
    shown: object = None


@dataclass(frozen=True, slots=True)
class _Asked:
    """The sources' answers about tokens after the first `local_tokens`, and the choice of a plan."""

    local_tokens: int
    answers: Sequence[tuple[Source, Answer]]
    plans: Sequence[LoadPlan]
    choice: Choice


class Admission:
    """Chooses the source that loads each request's KV. Only the engine's thread calls it.

    Attributes:
        loads: loads that may still write to their blocks.
        admitted: number of times that the engine has allocated blocks to a waiting request.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        *,
        loads: RunningLoads,
        parts: PartBlocks,
        headroom: Headroom,
        attempts: int,
        sources: Sequence[Source],
        chooser: BidChooser,
        events: EventStream,
        tenants: Tenants | None = None,
        prefix_cache: PrefixCache | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin without requests. Of equally good offers, that of the first of `sources` is taken.

        `attempts` is the maximum number of attempts to load one request's prefix. `prefix_cache` is None if
        the engine can use its own prefix without a load.
        """
        self.loads, self._prefix_cache, self.admitted = loads, prefix_cache, 0
        self._parts, self._headroom, self._events, self._clock = parts, headroom, events, clock
        self._tenants = tenants
        self._sources, self._chooser, self._attempts = tuple(sources), chooser, attempts
        self._alignment_tokens = common_alignment((group.kind, group.block_tokens) for group in groups)
        self._states: dict[str, _RequestState] = {}
        # Requests whose loads have succeeded, until the engine computes tokens of them.
        self._loaded: dict[str, _RequestState] = {}
        # Requests for which no source loads KV, until the engine computes them. Until then another connector
        # of the engine may still load tokens of them, which their event counts.
        self._unserved: dict[str, Request] = {}
        self._late_blocks = 0

    def __len__(self) -> int:
        return len(self._states)

    def on_new_request(self, request: Request) -> None:
        excluded = dict[str, str]()
        sources, others = list[Source](), list[Source]()
        for source in self._sources:
            (sources if source.arrived(request, excluded) else others).append(source)
        self._tell_arrived(request, sources, others)
        if sources:
            self._states[request.request_id] = _RequestState(
                attempts=self._attempts, excluded=excluded, sources=tuple(sources)
            )

    def matched(self, request: Request, local_tokens: int) -> int | None:
        """Return the number of tokens to load for a request that the engine wants to admit; 0 for no load.

        Return None if the engine must ask again in a later step. If the result is 0, an engine with a
        `PrefixCache` continues from `PrefixCache.resumable_tokens`.

        Args:
            local_tokens: number of tokens of the request in the engine's own prefix cache.
        """
        if self._parts.evict():
            return None  # the prefix that the engine has just found for this request may contain these blocks
        if (state := self._states.get(request.request_id)) is None:
            return 0
        phase = state.begin_admission()
        if phase is RequestPhase.LOADING:
            return 0
        if phase is RequestPhase.FAILED:
            return None  # other requests go first
        if phase is RequestPhase.RETRYING and state.proposed is not None:
            self._tell_no_room(request.request_id, state, local_tokens)
            return 0
        return self._choose(request, state, LocalPrefix.of(self._prefix_cache, request, local_tokens))

    def awaited(self, request_id: str) -> Bid | None:
        """Return the bid that a request waits for; None if `matched` has not put it off for a bid."""
        state = self._states.get(request_id)
        return None if state is None else state.awaited

    def _choose(self, request: Request, state: _RequestState, prefix: LocalPrefix) -> int | None:
        """Ask the sources, and choose the best plan. Return the result of `matched`.

        If no source can extend the engine's own prefix, which needs a load, ask for loads of a shorter one.
        """
        if (why := must_compute(request, prefix.resumable_tokens)) is not None:
            state.proposed = None
            self._tell_not_asked(request, state, prefix.resumable_tokens, *why)
            return 0
        asked = self._ask(request, state, prefix, prefix.tokens)
        unanswered = asked.choice.unanswered
        if asked.choice.bid is None and prefix.needs_load and not state.shortened:
            asked = self._ask(request, state, prefix, prefix.resumable_tokens)
            unanswered |= asked.choice.unanswered
        now = self._clock()
        state.end_wait(unanswered, self._chooser.speeds, now)
        self._tell_asked(request, state, prefix, asked)
        bid, local_tokens, crowded = asked.choice.bid, asked.local_tokens, False
        if bid is not None and not bid.looking:
            if local_tokens < prefix.tokens:
                # A load up to the bid's end brings at least a token. The evicted block enters the prefix
                # cache again when the request has loaded or computed its tokens.
                assert self._prefix_cache is not None
                end = local_tokens + bid.tokens
                self._prefix_cache.shorten(request, last_boundary_before(end, self._alignment_tokens))
                state.shortened, state.proposed = True, None
                return None
            for plan in asked.plans:
                if plan.bid is bid:
                    state.plan, crowded = plan, not self._has_room(plan, request, local_tokens)
        return state.propose(
            bid, local_tokens, now, crowded=crowded, patience_seconds=self._chooser.patience_seconds
        )

    def _ask(self, request: Request, state: _RequestState, prefix: LocalPrefix, local_tokens: int) -> _Asked:
        """Ask all sources for tokens after the first `local_tokens` tokens of a request, and choose.

        If `local_tokens` is less than all tokens of `prefix`, leave out plans for a longer prefix than that.
        """
        tokens, answers = request.num_tokens, [(one, one.ask(request, local_tokens)) for one in state.sources]
        plans = load_plans(answers, local_tokens, self._alignment_tokens)
        if self._parts.refused:
            plans = [plan for plan in plans if not self._fills_block_partly(plan, request, local_tokens)]
        if local_tokens < prefix.tokens:
            plans = [plan for plan in plans if local_tokens + plan.bid.tokens <= prefix.tokens]
        choice = self._chooser.choose(
            state,
            [(plan.last.name, plan.bid) for plan in plans],
            tokens - local_tokens,
            tokens - prefix.resumable_tokens,
            self._clock(),
        )
        return _Asked(local_tokens, answers, plans, choice)

    def _fills_block_partly(self, plan: LoadPlan, request: Request, local_tokens: int) -> bool:
        # While a source is still looking up its KV, it cannot be asked for the alignment.
        if plan.bid.looking:
            return False
        span = LoadSpan(local_tokens, local_tokens + plan.bid.tokens, request.num_tokens)
        return self._parts.would_fill_partly(span, plan.last.alignments(request.request_id))

    def _has_room(self, plan: LoadPlan, request: Request, local_tokens: int) -> bool:
        tokens, load_tokens = request.num_tokens, plan.bid.tokens
        if not self._headroom.fits(request.request_id, local_tokens + load_tokens, tokens):
            return False
        for source, bid, span in plan.parts(local_tokens, load_tokens, tokens):
            if not source.has_room(bid, self.loads.max_written_blocks(span)):
                return False
        return True

    def allocated(self, request: Request, blocks: Sequence[Sequence[Block]], load_tokens: int) -> None:
        """Begin the loads of a request for which the engine has just allocated blocks.

        Args:
            blocks: all blocks of the request by position, for each KV cache group. The loads write into them.
            load_tokens: as `matched` returned it last.
        """
        self.admitted += 1
        name = request.request_id
        if (state := self._states.get(name)) is None:
            self._unserved[name] = request
            return
        if state.phase is RequestPhase.SERVED:
            self._parts.on_resumed(name)
        if state.phase not in {RequestPhase.OPEN, RequestPhase.RETRYING}:
            return
        self._parts.forget(name)  # left from an earlier admission
        crowded, state.shortened = state.proposed is not None and state.crowded, False
        if state.admit(load_tokens, self._chooser.speeds, self._clock()) is None:
            if crowded:
                self._tell_no_room(name, state, state.local_tokens)
            self._settle(name, state)
            self._unserved[name] = request
            return
        assert state.plan is not None
        self._headroom.on_load_begun(name, state.local_tokens + load_tokens, request.num_tokens)
        parts = state.plan.parts(state.local_tokens, load_tokens, request.num_tokens)
        state.loaded, state.broken = [], False
        state.loads += (begun := self.loads.begin_all(request, blocks, parts))
        self._unserved.pop(name, None)
        for one in begun:
            self._events.emit(one.began)
        last = begun[-1]
        self._parts.begin(request, last.load.tables, last.load.span, last.source.alignments(name))

    def origins(self, request_id: str) -> Counter[str]:
        """Return the number of tokens that are being loaded for a request, by `Feed.origin`."""
        found = Counter[str]()
        for one in self._states[request_id].loads:
            found[one.feed.origin] += one.load.span.ends - one.load.span.begins
        return found

    def finished(self, request_id: str) -> None:
        """Forget a request that has ended. The blocks that its loads may still write to stay pinned."""
        self._headroom.forget(request_id)
        self._loaded.pop(request_id, None)
        self._unserved.pop(request_id, None)
        if (state := self._states.pop(request_id, None)) is not None:
            for one in state.loads:
                self.loads.mark_late(one)
                one.feed.drop()
            self._settle(request_id, state)
            for source in state.sources:
                source.finished(request_id)
        self._events.emit(Finished(request_id, self._clock()))
        if state is not None:
            self._tell_late_blocks()

    @property
    def agenda(self) -> tuple[Sized, ...]:
        """Containers that are all empty if a step needs no call of `schedule`."""
        return (
            *self.loads.agenda,
            self._loaded,
            self._headroom,
            self._unserved,
            *self._parts.agenda,
        )

    def schedule(self, requests: AbstractSet[str], orders: StepOrders) -> set[str]:
        """Add to `orders` what the workers do for loads in the coming step, and which loads to give up.

        The step computes tokens of `requests`, which no longer wait for loads. Return those of them that were
        admitted since their last step.
        """
        self._headroom.on_resumed(requests)
        # Hundreds may wait for a step: an intersection takes the time of the smaller set.
        loaded, unserved = self._loaded.keys() & requests, self._unserved.keys() & requests
        for name in loaded:
            self._loaded.pop(name).on_computed()
        for name in sorted(unserved):
            self._tell_scheduled(self._unserved.pop(name))
        self._parts.end_pass()
        self.loads.take_orders(orders)
        return loaded | unserved

    def take_reports(self, reports: StepReports) -> None:
        """Process the workers' reports, and unpin the blocks that no load can write to any more."""
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
        self.loads.release(reports.reports, reports.released)
        self._tell_late_blocks()

    def _ended(self, one: RunningLoad) -> None:
        assert one.report is not None
        load, merged, name = one.load, one.report, one.load.request_id
        state = self._states.get(name)
        waiting = state is not None and one in state.loads
        wanted = waiting and not (one.given_up and merged.failure is not None)
        self._tell_ended(one, None if wanted else _OTHER_PART if one.given_up else "")
        one.feed.ended(merged, wanted=wanted)
        if state is None or not waiting:
            return
        state.loads.remove(one)
        if merged.failure is None:
            state.loaded.append(one.began)
        else:
            state.broken = True
            self._parts.forget(name)
        # A late load takes at least this long. A part is not timed: windows and states dominate its time.
        if load.loads == 1 and not load.bid.growing and (merged.failure is None or merged.late):
            self._chooser.speeds.record_load(load.bid.parts, self._clock() - load.began)
        if state.loads:
            return
        if state.broken:
            state.on_failed()
            self._headroom.forget(name)
            return
        state.on_loaded()
        self._loaded[name] = state
        self._settle(name, state)
        # Computing the last token gives the next one, so an engine computes it even if its KV was loaded.
        cached = min(load.span.total, load.span.prompt - 1)
        event = Scheduled(name, self._clock(), cached, load.span.prompt, loads=tuple(state.loaded))
        self._events.emit(event)

    def _drop_sibling_loads(self, failed: RunningLoad) -> None:
        state = self._states.get(failed.load.request_id)
        for one in state.loads if state is not None else ():
            if one is not failed and one.load.attempt == failed.load.attempt and not one.given_up:
                self.loads.give_up(one, _OTHER_PART)
                one.feed.drop()

    def _settle(self, request_id: str, state: _RequestState) -> None:
        for source in state.sources:
            source.settled(request_id)

    # -- Events. An error while an event is made is logged and affects no decision. -------------------------

    @log_errors
    def _tell_arrived(self, request: Request, sources: Sequence[Source], others: Sequence[Source]) -> None:
        # W3C: a tracestate of 512 characters must be passed on, a longer one need not.
        headers = [item for item in request.trace_headers.items() if len(item[1]) <= _LONGEST_HEADER]
        tenant = tenant_of_request(request)
        self._events.emit(
            Arrived(
                request.request_id,
                self._clock(),
                tokens=int(request.num_tokens),
                sources=tuple([source.name for source in sources]),
                declined=tuple([miss for one in others if (miss := one.declined(request)) is not None]),
                ticket=has_offer(request.kv_transfer_params),
                trace_headers=tuple(headers),
                tenant="" if self._tenants is None else self._tenants.of(tenant).name,
                tenant_digest="" if self._tenants is None else tenant.hex(),
            )
        )

    @log_errors
    def _tell_asked(self, request: Request, state: _RequestState, prefix: LocalPrefix, asked: _Asked) -> None:
        # A choice that shows what the last one did is no event.
        choice, offered, offering = asked.choice, list[Bid](), list[Source]()
        for plan in asked.plans:
            offered.append(plan.bid)
            offering.append(plan.last)
        shown = prefix, asked.local_tokens, offered, choice.bid, state.attempts <= 0
        if state.shown == shown:
            return
        misses = list[SourceMiss]()
        for source, answer in asked.answers:
            if source not in offering:
                misses.append(answer.why_none())
        event = SourcesAsked(
            request.request_id,
            self._clock(),
            local_tokens=prefix.tokens,
            resumable_tokens=prefix.resumable_tokens,
            bids=choice.bids,
            compute_value=choice.compute_value,
            misses=tuple(misses),
            chosen=choice.bid,
            why=choice.why,
        )
        state.event, state.shown = event, shown
        self._events.emit(event)

    @log_errors
    def _tell_not_asked(
        self, request: Request, state: _RequestState, local_tokens: int, miss: MissReason, detail: str
    ) -> None:
        """Emit a `SourcesAsked` event that says why no source was asked, unless the last one did."""
        if state.shown == (local_tokens, miss):
            return
        event = SourcesAsked(
            request.request_id,
            self._clock(),
            local_tokens=local_tokens,
            resumable_tokens=local_tokens,
            bids=(),
            compute_value=self._chooser.value(None, request.num_tokens - local_tokens),
            misses=tuple([SourceMiss(source.name, miss, detail=detail) for source in state.sources]),
            chosen=None,
            why=DecisionReason.SKIPPED if miss is MissReason.SKIPPED else DecisionReason.NOTHING,
        )
        state.event, state.shown = event, (local_tokens, miss)
        self._events.emit(event)

    def _tell_no_room(self, request_id: str, state: _RequestState, local_tokens: int) -> None:
        """Emit a `SourcesAsked` event: a prompt is computed because too few blocks are free to load it."""
        if (last := state.event) is None:
            return
        state.shown = None
        state.event = replace(
            last,
            at=self._clock(),
            local_tokens=local_tokens,
            resumable_tokens=min(local_tokens, last.resumable_tokens),
            chosen=None,
            why=DecisionReason.NO_ROOM,
        )
        self._events.emit(state.event)

    @log_errors
    def _tell_ended(self, one: RunningLoad, unwanted: str | None) -> None:
        """Emit a `LoadEnded` event. `unwanted` says why no request waits for the load; None if one does."""
        assert one.report is not None
        report, failed = one.report, one.report.failure is not None
        moved, outcome = one.feed.moved(report), LoadOutcome.DROPPED
        if unwanted is None:
            outcome = LoadOutcome.READY
            if failed:
                outcome = LoadOutcome.EXPIRED if report.late else LoadOutcome.FAILED
        self._events.emit(
            LoadEnded(
                one.load.request_id,
                self._clock(),
                began=one.began,
                outcome=outcome,
                miss=one.feed.miss(report) if failed and unwanted is None else None,
                failure=(report.failure or "") if unwanted is None else unwanted,
                moved=() if failed else moved,
                figures=report.figures,
            )
        )

    @log_errors
    def _tell_scheduled(self, request: Request) -> None:
        """Emit a `Scheduled` event for a request for which no source has loaded KV."""
        name, own, available = request.request_id, request.own_hit, request.num_computed_tokens
        if own is None:
            state = self._states.get(name)
            own = available if state is None or state.event is None else state.event.local_tokens
        others = max(0, available - own)
        self._events.emit(Scheduled(name, self._clock(), available, request.num_tokens, others))

    def _tell_late_blocks(self) -> None:
        if (blocks := self.loads.late_blocks()) != self._late_blocks:
            self._late_blocks = blocks
            self._events.emit(LateBlocks(self._clock(), blocks))
