"""Admission over child connectors: ask all, choose the one that loads, exclude a child after its load failed.

Requests go through the phases of kvferry's own admission (`connector.request_phases`). A child that was not
chosen gets the blocks with 0 tokens to load, as in vLLM's MultiConnector, and drops its state of the request.

Children with synchronous loads report nothing. Their request waits for nothing: it is SERVED when it is
admitted, and the child is struck out if it reports blocks that did not load. Such a load needs no headroom,
because the step that loads goes on with the request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.connector.bids import Bid, Bidding, Part
from kvferry.connector.headroom import Headroom
from kvferry.connector.policies import Choice
from kvferry.connector.request_phases import RequestPhase, RequestPhases, RequestState, Standing
from kvferry.engines.vllm.multi.counts import Counts


@dataclass(frozen=True, slots=True)
class _Plan:
    """The load of a prefix by one child.

    Attributes:
        place: index of the child.
        bid: its bid.
        asynchronous: the load runs between steps, and the child reports its end.
    """

    place: int
    bid: Bid
    asynchronous: bool


@dataclass(slots=True)
class _Load:
    """Load of a request by a child.

    Attributes:
        plan: the plan that was taken.
        blocks: vLLM's blocks of the request.
        began: start of the load, in seconds of the clock.
        invalid: a child has reported blocks of it that did not load.
    """

    plan: _Plan
    blocks: Any
    began: float
    invalid: bool = False


@dataclass(slots=True)
class _RequestState(RequestState[_Plan]):
    """State of one request.

    Attributes:
        answers: the children's last answers, in tokens; None for a child that is still looking.
        load: the load under way; a synchronous load stays until the request ends or is admitted anew.
    """

    answers: tuple[int | None, ...] = ()
    load: _Load | None = None


class ChildAdmission:
    """Decides for every request which child loads it. Only the engine's thread calls it.

    Attributes:
        counts: counters per child.
        phases: moves requests from phase to phase. Its headroom is set once the engine has its blocks.
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
        self.counts, self.phases = Counts(), RequestPhases(choice, Headroom(), clock)
        self._names, self._children = tuple(names), tuple(children)
        self._choice, self._attempts, self._clock = choice, attempts, clock
        self._known: dict[str, _RequestState] = {}
        self._loads: dict[str, _Load] = {}
        self._new: dict[str, int] = {}

    def __len__(self) -> int:
        """Return the number of known requests plus the number of loads under way."""
        return len(self._known) + len(self._loads)

    def matched(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Return the tokens to load beyond `local_tokens`, and True for a load between steps.

        The tokens are None if the engine must ask again.
        """
        known = self._known.setdefault(request.request_id, _RequestState(Bidding(self._attempts)))
        answers = [child.get_num_new_matched_tokens(request, local_tokens) for child in self._children]
        known.answers = tuple(tokens for tokens, _ in answers)
        if known.phase is RequestPhase.SERVED:
            self._settle(known)
        standing = self.phases.standing(known)
        if standing is not Standing.ASK:
            return (None if standing is Standing.ASIDE else 0), False
        best = self.phases.best(
            known, self._plans(request.num_tokens - local_tokens, answers), request, local_tokens
        )
        tokens = self.phases.propose(
            known, best, local_tokens, lambda plan: self._has_room(plan, request, local_tokens)
        )
        return tokens, best is not None and best.asynchronous and bool(tokens)

    def _plans(self, rest: int, answers: Sequence[tuple[int | None, bool]]) -> list[_Plan]:
        """Return a plan for each child, of the children's answers; the engine lacks `rest` tokens."""
        return [
            # A child that is looking may find all but the last token, which is always computed.
            _Plan(
                place,
                Bid(name, (Part(name, rest - 1 if tokens is None else tokens),), looking=tokens is None),
                asynchronous,
            )
            for place, (name, (tokens, asynchronous)) in enumerate(zip(self._names, answers, strict=True))
        ]

    def _has_room(self, plan: _Plan, request: Any, local_tokens: int) -> bool:
        """Return whether a load leaves the blocks that waiting requests need."""
        total = local_tokens + plan.bid.tokens
        return not plan.asynchronous or self.phases.headroom.fits(
            request.request_id, total, request.num_tokens
        )

    def chosen(self, request_id: str) -> int | None:
        """Return the index of the child that is to load the request or is loading it; None without one."""
        known = self._known.get(request_id)
        if known is None:
            return None
        if known.taken is not None:
            return known.taken[0].place
        return None if known.load is None else known.load.plan.place

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
        return None if known is None or known.phase is RequestPhase.LOADING else loader

    def _admit(self, request: Any, known: _RequestState, blocks: Any, external: int) -> int | None:
        """Begin the chosen load if there are tokens to load; return the index of its child, or None."""
        taken = self.phases.admit(known, external)
        answers = zip(self._names, known.answers, strict=True)
        self.counts.admitted(answers, None if taken is None else taken[0].bid.source, external)
        if taken is None:
            known.load = None
            return None
        plan, local_tokens = taken
        known.load = _Load(plan, blocks, self._clock())
        if plan.asynchronous:
            self.phases.wait(known, request, local_tokens + external)
            self._loads[request.request_id] = known.load
            self._new[request.request_id] = plan.place
            self.counts.pending[plan.bid.source] += 1
        return plan.place

    def take_new(self) -> dict[str, int]:
        """Return the requests that wait for a child since the last call, each with the child's index."""
        new, self._new = self._new, {}
        return new

    def take_results(self, received: set[str], failed: set[str], invalid: set[int]) -> None:
        """Handle a step's results: received requests, the failed ones among them, and blocks not loaded."""
        if invalid:
            self._strike_for(invalid)
        for request_id in received:
            load = self._loads.pop(request_id, None)
            if load is None:
                continue
            name, succeeded = load.plan.bid.source, request_id not in failed and not load.invalid
            self.counts.pending[name] -= 1
            self.counts.ended(name, succeeded=succeeded)
            if succeeded:
                self._choice.speeds.loaded(load.plan.bid.parts, self._clock() - load.began)
            known = self._known.get(request_id)
            if known is not None and known.load is load:
                if succeeded:
                    known.load = None
                else:
                    known.bidding.strike(name, "its load failed")
                self.phases.ended(known, request_id, failed=not succeeded)

    def _strike_for(self, invalid: set[int]) -> None:
        """Strike out the children that were to load these blocks, which are invalid."""
        for known in self._known.values():
            load = known.load
            if load is None or not any(invalid.intersection(ids) for ids in load.blocks.get_block_ids()):
                continue
            load.invalid = True
            known.bidding.strike(load.plan.bid.source, "blocks of its load failed")

    def finished(self, request_id: str) -> None:
        """Forget a request that has ended in any way; an asynchronous load under way is still reported."""
        self.phases.forget(request_id)
        known = self._known.pop(request_id, None)
        if known is not None:
            self._settle(known)

    def _settle(self, known: _RequestState) -> None:
        """End a synchronous load, which no child reports."""
        load, known.load = known.load, None
        if load is not None and not load.plan.asynchronous:
            self.counts.ended(load.plan.bid.source, succeeded=not load.invalid)
            if not load.invalid:
                known.bidding.succeeded()
                known.bidding.computed()  # in the step that loaded
