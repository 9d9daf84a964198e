"""Choice of the child that loads a request: ask all, choose one, exclude a child after its load failed.

Phases of a request, kept in its `_RequestState` (`admission` has the same phases for kvferry's own sources):

    OPEN ─admitted with blocks─▶ LOADING ─its child reports it─▶ SERVED
      │                             └─as failed─▶ (struck out) FAILED ─lets others pass─▶ OPEN ─▶ …
      └─nothing to load─▶ SERVED ─preempted, admitted anew─▶ OPEN

A child that was not chosen gets the blocks with 0 tokens to load, as in vLLM's MultiConnector, and drops
its state for the request. Children with synchronous loads report nothing. Their request is SERVED when
it is admitted, and the child is struck out if it reports blocks that did not load.

An asynchronous load waits if it would leave too little `headroom` for waiting requests.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.connector.bids import Bid, Bidding, Part
from kvferry.connector.headroom import Headroom
from kvferry.connector.policies import Choice
from kvferry.connector.request_phase import RequestPhase
from kvferry.connector.waiting import Waiting

Count = tuple[str, str, str]
"""(metric, child, outcome or nothing) of something that is counted."""


@dataclass(slots=True)
class _Load:
    """Load of a request by a child.

    Attributes:
        place: index of the child.
        bid: the bid that was taken.
        waits: True if the child reports the end of the load.
        blocks: vLLM's blocks of the request.
        began: start of the load, in seconds of the clock.
        spoilt: True once the engine was told of blocks that did not load.
    """

    place: int
    bid: Bid
    waits: bool
    blocks: Any
    began: float
    spoilt: bool = False


@dataclass(slots=True)
class _RequestState:
    """State of one request.

    Attributes:
        bidding: its bids and attempts.
        phase: its phase, as drawn in the module's diagram.
        answers: the children's last answers, in tokens; None for a child that is still looking.
        had: tokens that the engine had at that time.
        taken: index of the child that is to load, and its bid.
        waits: True if the load is asynchronous, between steps.
        load: the load under way; a synchronous load stays until the request ends or is admitted anew.
        failed: True if the last load failed.
        waiting: time spent waiting for room, or for children that were looking.
    """

    bidding: Bidding
    phase: RequestPhase = RequestPhase.OPEN
    answers: tuple[int | None, ...] = ()
    had: int = 0
    taken: tuple[int, Bid] | None = None
    waits: bool = False
    load: _Load | None = None
    failed: bool = False
    waiting: Waiting = field(default_factory=Waiting)


@dataclass(slots=True)
class Counts:
    """Counts of events since the last call of `take`.

    Attributes:
        more: increments of counters.
        pending: current loads under way per child.
    """

    more: Counter[Count] = field(default_factory=Counter)
    pending: Counter[str] = field(default_factory=Counter)

    def take(self) -> Counter[Count]:
        """Return the increments and begin new ones."""
        taken, self.more = self.more, Counter()
        return taken


class Choosing:
    """Decides for every request which child loads it. Only the engine's thread calls it.

    Attributes:
        counts: counters per child.
        headroom: blocks to leave for waiting requests; set once the engine has its blocks.
    """

    def __init__(
        self,
        names: Sequence[str],
        children: Sequence[Any],
        choice: Choice,
        attempts: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin without requests.

        Args:
            names: names of the children.
            children: connectors, made for the scheduler.
            choice: policy that chooses between the children's bids, with the children's names as sources.
            attempts: maximum loads of one request.
            clock: returns seconds.
        """
        self.counts, self.headroom = Counts(), Headroom()
        self._names, self._children = tuple(names), tuple(children)
        self._choice, self._attempts, self._clock = choice, attempts, clock
        self._known: dict[str, _RequestState] = {}
        self._loads: dict[str, _Load] = {}
        self._new: dict[str, int] = {}
        self._brought: dict[str, Bidding] = {}

    def __len__(self) -> int:
        """Return the number of known requests plus the number of loads under way."""
        return len(self._known) + len(self._loads)

    def matched(self, request: Any, have: int) -> tuple[int | None, bool]:
        """Return the tokens to load beyond `have`, and True for a load between steps.

        The tokens are None if the engine must ask again.
        """
        known = self._known.setdefault(request.request_id, _RequestState(Bidding(self._attempts)))
        answers = [child.get_num_new_matched_tokens(request, have) for child in self._children]
        known.answers, known.had = tuple(tokens for tokens, _ in answers), have
        if known.phase is RequestPhase.LOADING:
            return 0, False
        if known.phase is RequestPhase.FAILED:
            known.phase, known.failed = RequestPhase.OPEN, True
            return None, False
        if known.failed and known.taken is not None:
            return 0, False  # it found no room: see `admission`
        if known.phase is RequestPhase.SERVED:
            self._settle(known)
            known.phase = RequestPhase.OPEN
        return self._best(known, request, have, [waits for _, waits in answers])

    def _best(
        self, known: _RequestState, request: Any, have: int, waits: Sequence[bool]
    ) -> tuple[int | None, bool]:
        rest = request.num_tokens - have
        bids = [
            # One that is looking may come to all but the last token, which is always computed.
            Bid(name, (Part(name, rest - 1 if tokens is None else tokens),), looking=tokens is None)
            for name, tokens in zip(self._names, known.answers, strict=True)
        ]
        now = self._clock()
        waited = known.waiting.until(now)
        best = self._choice.of(
            known.bidding.open(bids, rest),
            rest,
            waited=waited,
            before=None if known.taken is None else known.taken[1],
        )
        if best is None:
            known.taken = None
            return 0, False
        if not best.looking:
            place, total = self._names.index(best.source), have + best.tokens
            known.taken, known.waits = (place, best), waits[place]
            if not known.waits or self.headroom.fits(request.request_id, total, request.num_tokens):
                return best.tokens, known.waits
            if waited >= self._choice.patience_seconds:
                return 0, False
        known.waiting.begin(now)
        return None, False

    def scheduled(self, requests: Container[str]) -> None:
        """Note the requests that the coming step computes tokens of."""
        self.headroom.go_on(requests)
        for name in [name for name in self._brought if name in requests]:
            self._brought.pop(name).computed()

    def chosen(self, request_id: str) -> int | None:
        """Return the index of the child that is to load the request or is loading it; None without one."""
        known = self._known.get(request_id)
        if known is None:
            return None
        if known.taken is not None:
            return known.taken[0]
        return None if known.load is None else known.load.place

    def allocated(self, request: Any, blocks: Any, external: int) -> int | None:
        """Hand the request's blocks to all children; the chosen child loads `external` tokens into them.

        Returns:
            Index of the child that loads within the step that uses the blocks; None without one.
        """
        known = self._known.get(request.request_id)
        loader = None
        if known is not None and known.phase is RequestPhase.OPEN:
            loader = self._admit(request, known, blocks, external)
        for place, child in enumerate(self._children):
            child.update_state_after_alloc(request, blocks, external if place == loader else 0)
        return None if known is None or known.waits else loader

    def _admit(self, request: Any, known: _RequestState, blocks: Any, external: int) -> int | None:
        """Begin the chosen load if there are tokens to load; return the index of its child, or None."""
        taken, known.taken, known.failed = known.taken, None, False
        self._count(known.answers, None if taken is None or not external else taken[0], external)
        if taken is None or not external:
            known.phase, known.load = RequestPhase.SERVED, None
            return None
        place, bid = taken
        known.load = _Load(place, bid, known.waits, blocks, self._clock())
        known.bidding.take()
        if known.waits:
            known.phase = RequestPhase.LOADING
            self._loads[request.request_id] = known.load
            self._new[request.request_id] = place
            self.headroom.loads(request.request_id, known.had + external, request.num_tokens)
            self.counts.pending[self._names[place]] += 1
        else:
            known.phase = RequestPhase.SERVED
        return place

    def _count(self, answers: Sequence[int | None], loader: int | None, tokens: int) -> None:
        more = self.counts.more
        for place, (name, answer) in enumerate(zip(self._names, answers, strict=True)):
            more["queries", name, ""] += 1
            if place == loader:
                more["hits", name, ""] += 1
                more["hit_tokens", name, ""] += tokens
            elif answer:
                more["passed_over", name, ""] += 1
            else:
                more["misses", name, ""] += 1

    def take_new(self) -> dict[str, int]:
        """Return the requests that wait for a child since the last call, each with the child's index."""
        new, self._new = self._new, {}
        return new

    def heard(self, received: set[str], failed: set[str], spoilt: set[int]) -> None:
        """Handle a step's results: received requests, the failed ones among them, and blocks not loaded."""
        if spoilt:
            self._look_for(spoilt)
        for request_id in received:
            load = self._loads.pop(request_id, None)
            if load is None:
                continue
            name, good = self._names[load.place], request_id not in failed and not load.spoilt
            self.counts.pending[name] -= 1
            self.counts.more["loads", name, "ready" if good else "failed"] += 1
            if good:
                self._choice.speeds.loaded(load.bid.parts, self._clock() - load.began)
            known = self._known.get(request_id)
            if known is not None and known.load is load:
                self._end(request_id, known, load, good=good)

    def _end(self, request_id: str, known: _RequestState, load: _Load, *, good: bool) -> None:
        if good:
            known.bidding.succeeded()
            self._brought[request_id] = known.bidding
            known.phase, known.load = RequestPhase.SERVED, None
        else:
            known.bidding.strike(self._names[load.place], "its load failed")
            known.phase = RequestPhase.FAILED
            self.headroom.forget(request_id)

    def _look_for(self, spoilt: set[int]) -> None:
        """Strike out the children that were to load these blocks."""
        for known in self._known.values():
            load = known.load
            if load is None or not any(spoilt.intersection(ids) for ids in load.blocks.get_block_ids()):
                continue
            load.spoilt = True
            known.bidding.strike(self._names[load.place], "blocks of its load failed")

    def finished(self, request_id: str) -> None:
        """Forget a request that has ended in any way; an asynchronous load under way is still reported."""
        self.headroom.forget(request_id)
        self._brought.pop(request_id, None)
        known = self._known.pop(request_id, None)
        if known is not None:
            self._settle(known)

    def _settle(self, known: _RequestState) -> None:
        """End a synchronous load, which no child reports."""
        load, known.load = known.load, None
        if load is not None and not load.waits:
            outcome = "failed" if load.spoilt else "ready"
            self.counts.more["loads", self._names[load.place], outcome] += 1
            if not load.spoilt:
                known.bidding.succeeded()
                known.bidding.computed()  # in the step that loaded
