"""Which child loads a request: all are asked, one is chosen, and one that failed it is not chosen again.

One `_Wish` per request, in the states that `admission` has for kvferry's own sources:

    OPEN ─admitted with blocks─▶ LOADING ─its child reports it─▶ SERVED
      │                             └─as failed─▶ (struck out) FAILED ─lets others pass─▶ OPEN ─▶ …
      └─nothing to load─▶ SERVED ─preempted, admitted anew─▶ OPEN

A child that was not chosen is told of the blocks with 0 tokens to load, as vLLM's MultiConnector does: it
lets go of what it has for the request. Children whose loads are synchronous report nothing: the request is
SERVED when it is admitted, and the child is struck out if the engine is told of blocks that did not load.

A load between steps that leaves too little `headroom` waits for others that wait, as for one that is looking.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kvferry.cache.bids import Bid, Bidding, Part
from kvferry.cache.policies import Choice
from kvferry.cache.waiting import Waiting
from kvferry.engines.vllm.headroom import Headroom

Count = tuple[str, str, str]
"""(metric, child, outcome or nothing) of something that is counted."""


class _State(Enum):
    OPEN = "open"
    LOADING = "loading"
    FAILED = "failed"
    SERVED = "served"


@dataclass(slots=True)
class _Load:
    """What a child loads.

    Attributes:
        place: of the child.
        bid: that was taken.
        waits: the child reports when it is done.
        blocks: vLLM's, of the request.
        began: seconds of the clock.
        spoilt: the engine was told of blocks that did not load.
    """

    place: int
    bid: Bid
    waits: bool
    blocks: Any
    began: float
    spoilt: bool = False


@dataclass(slots=True)
class _Wish:
    """A request, and where it stands.

    Attributes:
        bidding: over its attempts.
        state: see the module.
        answers: of the children, when they were asked last: tokens, None while one is looking.
        had: tokens that were here when they were.
        taken: place of the child that is to load, and its bid.
        waits: whether what was taken is loaded between steps.
        load: under way; a synchronous one until the request ends or is admitted anew.
        failed: the last load did.
        waiting: for children that were looking, and for room.
    """

    bidding: Bidding
    state: _State = _State.OPEN
    answers: tuple[int | None, ...] = ()
    had: int = 0
    taken: tuple[int, Bid] | None = None
    waits: bool = False
    load: _Load | None = None
    failed: bool = False
    waiting: Waiting = field(default_factory=Waiting)


@dataclass(slots=True)
class Counts:
    """What happened since the last look.

    Attributes:
        more: counted up.
        pending: loads under way per child, as it is now.
    """

    more: Counter[Count] = field(default_factory=Counter)
    pending: Counter[str] = field(default_factory=Counter)

    def take(self) -> Counter[Count]:
        """What was counted; from now on anew."""
        taken, self.more = self.more, Counter()
        return taken


class Choosing:
    """See the module. The engine's thread calls it.

    Attributes:
        counts: per child.
        headroom: for what comes after loads; set once the engine has its blocks.
    """

    def __init__(
        self,
        names: Sequence[str],
        children: Sequence[Any],
        choice: Choice,
        attempts: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin.

        Args:
            names: of the children.
            children: connectors, made for the scheduler.
            choice: between what they offer, with their names as places.
            attempts: loads of a request.
            clock: seconds.
        """
        self.counts, self.headroom = Counts(), Headroom()
        self._names, self._children = tuple(names), tuple(children)
        self._choice, self._attempts, self._clock = choice, attempts, clock
        self._wishes: dict[str, _Wish] = {}
        self._loads: dict[str, _Load] = {}
        self._new: dict[str, int] = {}
        self._brought: dict[str, Bidding] = {}

    def __len__(self) -> int:
        """Requests that are known, and loads that are under way."""
        return len(self._wishes) + len(self._loads)

    def matched(self, request: Any, have: int) -> tuple[int | None, bool]:
        """Tokens to load beyond `have`, and whether between steps; None to be asked again."""
        wish = self._wishes.setdefault(request.request_id, _Wish(Bidding(self._attempts)))
        answers = [child.get_num_new_matched_tokens(request, have) for child in self._children]
        wish.answers, wish.had = tuple(tokens for tokens, _ in answers), have
        if wish.state is _State.LOADING:
            return 0, False
        if wish.state is _State.FAILED:
            wish.state, wish.failed = _State.OPEN, True
            return None, False
        if wish.failed and wish.taken is not None:
            return 0, False  # it found no room: see `admission`
        if wish.state is _State.SERVED:
            self._settle(wish)
            wish.state = _State.OPEN
        return self._best(wish, request, have, [waits for _, waits in answers])

    def _best(self, wish: _Wish, request: Any, have: int, waits: Sequence[bool]) -> tuple[int | None, bool]:
        rest = request.num_tokens - have
        bids = [
            # One that is looking may come to all but the last token, which is always computed.
            Bid(name, (Part(name, rest - 1 if tokens is None else tokens),), looking=tokens is None)
            for name, tokens in zip(self._names, wish.answers, strict=True)
        ]
        now = self._clock()
        waited = wish.waiting.until(now)
        best = self._choice.of(
            wish.bidding.open(bids, rest),
            rest,
            waited=waited,
            before=None if wish.taken is None else wish.taken[1],
        )
        if best is None:
            wish.taken = None
            return 0, False
        if not best.looking:
            place, total = self._names.index(best.source), have + best.tokens
            wish.taken, wish.waits = (place, best), waits[place]
            if not wish.waits or self.headroom.fits(request.request_id, total, request.num_tokens):
                return best.tokens, wish.waits
            if waited >= self._choice.patience_seconds:
                return 0, False
        wish.waiting.begin(now)
        return None, False

    def scheduled(self, requests: Container[str]) -> None:
        """The coming step computes something of these."""
        self.headroom.go_on(requests)
        for name in [name for name in self._brought if name in requests]:
            self._brought.pop(name).computed()

    def chosen(self, request_id: str) -> int | None:
        """Place of the child that is to load, or loads, the request."""
        wish = self._wishes.get(request_id)
        if wish is None:
            return None
        if wish.taken is not None:
            return wish.taken[0]
        return None if wish.load is None else wish.load.place

    def allocated(self, request: Any, blocks: Any, external: int) -> int | None:
        """The request has blocks; `external` tokens are to be loaded into them, or none.

        Returns:
            Place of the child that loads them within the step that uses them, if one does.
        """
        wish = self._wishes.get(request.request_id)
        loader = None
        if wish is not None and wish.state is _State.OPEN:
            loader = self._admit(request, wish, blocks, external)
        for place, child in enumerate(self._children):
            child.update_state_after_alloc(request, blocks, external if place == loader else 0)
        return None if wish is None or wish.waits else loader

    def _admit(self, request: Any, wish: _Wish, blocks: Any, external: int) -> int | None:
        """Begin to load what was taken, if anything is to be loaded; the place of the child that does."""
        taken, wish.taken, wish.failed = wish.taken, None, False
        self._count(wish.answers, None if taken is None or not external else taken[0], external)
        if taken is None or not external:
            wish.state, wish.load = _State.SERVED, None
            return None
        place, bid = taken
        wish.load = _Load(place, bid, wish.waits, blocks, self._clock())
        wish.bidding.take()
        if wish.waits:
            wish.state = _State.LOADING
            self._loads[request.request_id] = wish.load
            self._new[request.request_id] = place
            self.headroom.loads(request.request_id, wish.had + external, request.num_tokens)
            self.counts.pending[self._names[place]] += 1
        else:
            wish.state = _State.SERVED
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
        """Requests that wait for a child since the last call, and for which."""
        new, self._new = self._new, {}
        return new

    def heard(self, received: set[str], failed: set[str], spoilt: set[int]) -> None:
        """What the engine is told of a step: requests arrived, which of them failed, blocks not loaded."""
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
            wish = self._wishes.get(request_id)
            if wish is not None and wish.load is load:
                self._end(request_id, wish, load, good=good)

    def _end(self, request_id: str, wish: _Wish, load: _Load, *, good: bool) -> None:
        if good:
            wish.bidding.succeeded()
            self._brought[request_id] = wish.bidding
            wish.state, wish.load = _State.SERVED, None
        else:
            wish.bidding.strike(self._names[load.place], "its load failed")
            wish.state = _State.FAILED
            self.headroom.forget(request_id)

    def _look_for(self, spoilt: set[int]) -> None:
        """Strike out whoever was to load these blocks."""
        for wish in self._wishes.values():
            load = wish.load
            if load is None or not any(spoilt.intersection(ids) for ids in load.blocks.get_block_ids()):
                continue
            load.spoilt = True
            wish.bidding.strike(self._names[load.place], "blocks of its load failed")

    def finished(self, request_id: str) -> None:
        """The request has ended, whichever way; a load that is under way is still reported."""
        self.headroom.forget(request_id)
        self._brought.pop(request_id, None)
        wish = self._wishes.pop(request_id, None)
        if wish is not None:
            self._settle(wish)

    def _settle(self, wish: _Wish) -> None:
        """A load that nobody reports is over."""
        load, wish.load = wish.load, None
        if load is not None and not load.waits:
            outcome = "failed" if load.spoilt else "ready"
            self.counts.more["loads", self._names[load.place], outcome] += 1
            if not load.spoilt:
                wish.bidding.succeeded()
                wish.bidding.computed()  # in the step that loaded
