"""The phases of requests whose KV cache may be loaded, and all transitions between them.

    OPEN ─admitted, waits for loads─▶ LOADING ─all loaded─▶ SERVED
      │                                  └─one failed─▶ FAILED ─lets others pass once─▶ OPEN ─▶ …
      └─admitted, waits for nothing─▶ SERVED ─preempted, admitted anew─▶ OPEN

At each admission the caller asks for the `next_action`. On ASK it collects plans, chooses the `best` one and
gives the engine the result of `propose`. Once the engine has allocated blocks, `admit` accepts the proposed
plan, `wait` records that the request waits for its loads, and `ended` records that these have ended.

vLLM queues a request whose load has failed before requests whose loads hold blocks, and keeps blocks reserved
for the failed load. If the request needed more blocks than are left, neither it nor the others would ever go
on. So it lets the others pass once. If the next plan does not find enough blocks at once, the prompt is
computed, for which vLLM reserves nothing. A load also waits if it would leave too few free blocks to waiting
requests (`headroom`), or if its source may hold no more blocks. When the request has waited for longer than
its patience, the prompt is computed. `choosing` decides how long a request waits for a source's answer.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence, Sized
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

from kvferry.connector.choosing import BidChooser
from kvferry.connector.engine import Request
from kvferry.connector.load import Bid, Bidding
from kvferry.connector.room import Headroom
from kvferry.connector.speeds import AwaitedAnswers, Waiting


class RequestPhase(Enum):
    """The phase of a request whose KV may be loaded.

    OPEN: a source may still be chosen. LOADING: the request waits for its loads. FAILED: a load has failed.
    SERVED: the request waits for no load.
    """

    OPEN = "open"
    LOADING = "loading"
    FAILED = "failed"
    SERVED = "served"


class AdmitAction(Enum):
    """The way to handle a request that the engine wants to admit.

    ASK: ask its sources for load plans (which tokens each source can load). KEEP_LOADING: its loads are still
    running, so start no more. SET_ASIDE: its load failed, so admit other requests first. COMPUTE: its load
    failed and a new plan was chosen, but too few blocks were free for that plan, so compute the prompt.
    """

    ASK = "its sources are asked for plans"
    KEEP_LOADING = "nothing more is loaded: its loads are under way"
    SET_ASIDE = "its load has failed: others pass it, and it is admitted later"
    COMPUTE = "it is computed: the plan after a failed load has found no blocks"


class Plan(Protocol):
    """A plan to load the KV of a prompt prefix, from one source or several."""

    @property
    def bid(self) -> Bid:
        """The offer of the plan's sources to load tokens of the prefix."""


PlanT = TypeVar("PlanT", bound=Plan)


@dataclass(slots=True)
class RequestState(Generic[PlanT]):
    """The state of one request whose KV may be loaded.

    Attributes:
        bidding: excluded sources and remaining attempts of the request.
        phase: current phase of the request. It changes as the loads begin and end.
        taken: plan that `RequestPhases.propose` recorded last, and the number of the request's tokens that
            were then in the engine's prefix cache; None if there is none.
        crowded: True if the loads of `taken` could not begin when it was recorded, because they would leave
            too few blocks free or exceed the number of blocks that their source may hold.
        failed: True if the last attempt has failed.
        waiting: stopwatch for the time that the request waits for free blocks, or for sources that are still
            looking up their KV.
        awaited: bid that the request waits for, because its sources are still looking up their KV or too few
            blocks are free; None if the request does not wait.
        unanswered: answers of sources that the request has asked for and not received, to measure their time.
    """

    bidding: Bidding
    phase: RequestPhase = RequestPhase.OPEN
    taken: tuple[PlanT, int] | None = None
    crowded: bool = False
    failed: bool = False
    waiting: Waiting = field(default_factory=Waiting)
    awaited: Bid | None = None
    unanswered: AwaitedAnswers = field(default_factory=AwaitedAnswers)


class RequestPhases:
    """State machine that moves requests from phase to phase (open, loading, failed, served).

    Its methods mutate the states that they are given. Only the engine's thread calls it.

    Attributes:
        headroom: object that decides whether a load leaves enough free blocks for the requests that already
            wait for their loads.
    """

    def __init__(self, chooser: BidChooser, headroom: Headroom, clock: Callable[[], float]) -> None:
        """Create the state machine of the requests whose KV may be loaded. It has no requests yet.

        Args:
            clock: function that returns monotonic seconds.
        """
        self.headroom = headroom
        self._chooser, self._clock = chooser, clock
        self._loaded: dict[str, Bidding] = {}

    def next_action(self, state: RequestState[Any]) -> AdmitAction:
        """Return how to handle a request that the engine wants to admit.

        Mutates `state`: after a failed load, the request is set aside once, then its sources are asked again.
        """
        if state.phase is RequestPhase.LOADING:
            return AdmitAction.KEEP_LOADING
        if state.phase is RequestPhase.FAILED:
            state.phase, state.failed = RequestPhase.OPEN, True
            return AdmitAction.SET_ASIDE
        if state.failed and state.taken is not None:
            return AdmitAction.COMPUTE
        state.phase = RequestPhase.OPEN
        return AdmitAction.ASK

    def best(
        self,
        state: RequestState[PlanT],
        plans: Sequence[PlanT],
        request: Request,
        local_tokens: int,
        *,
        resumable_tokens: int | None = None,
    ) -> PlanT | None:
        """Return the plan to take; None if the engine computes the prompt.

        If a source of the returned plan is still looking up its KV, the request waits for this source.
        Mutates `state`: the answers that are missing are noted there, and the wait so far is added up.

        Args:
            plans: plans to load the request's prefix, in the order of their sources.
            resumable_tokens: number of these tokens that the engine can use if nothing is loaded; None for
                all of them.
        """
        missing_tokens = request.num_tokens - local_tokens
        bids = state.bidding.eligible_bids((plan.bid for plan in plans), missing_tokens)
        for bid in bids:
            state.unanswered.note(bid.unanswered)
        best = self._chooser.choose(
            bids,
            missing_tokens,
            waited=state.waiting.until(self._clock()),
            before=None if state.taken is None else state.taken[0].bid,
            computed_tokens=None if resumable_tokens is None else request.num_tokens - resumable_tokens,
        )
        return next((plan for plan in plans if plan.bid is best), None)

    def propose(
        self,
        state: RequestState[PlanT],
        plan: PlanT | None,
        local_tokens: int,
        has_room: Callable[[PlanT], bool],
    ) -> int | None:
        """Return the number of tokens to load for a plan, beyond `local_tokens`; 0 to compute the prompt.

        Return None while the request waits for free blocks, or for a source that is still looking up its KV.
        Mutates `state`: the plan is kept there for `admit`. Records how long answers took that have arrived.

        Args:
            plan: plan returned by `best`; None to compute.
        """
        state.unanswered.settle(self._chooser.answer_times, self._clock())
        state.awaited = None
        if plan is None:
            state.taken = None
            return 0
        if not plan.bid.looking:
            state.taken, state.crowded = (plan, local_tokens), not has_room(plan)
            if not state.crowded:
                return plan.bid.tokens
            if state.waiting.seconds >= self._chooser.patience_seconds:
                return 0
        state.awaited = plan.bid
        state.waiting.begin(self._clock())
        return None

    def admit(self, state: RequestState[PlanT], load_tokens: int) -> tuple[PlanT, int] | None:
        """Record that the engine has allocated blocks to a request. Beginning a plan uses up one attempt.

        Args:
            load_tokens: number of tokens that the engine expects to be loaded; 0 for none.

        Returns:
            (plan, local_tokens): the plan to begin, and the number of the request's tokens that were in the
            engine's prefix cache when the plan was proposed. None to load nothing.
        """
        state.unanswered.give_up(self._chooser.answer_times, self._clock())
        taken, state.taken, state.failed = state.taken, None, False
        state.phase = RequestPhase.SERVED
        if not load_tokens or taken is None:
            return None
        state.bidding.use_attempt()
        return taken

    def wait(self, state: RequestState[Any], request: Request, tokens_after_load: int) -> None:
        """Record that an admitted request waits for its loads."""
        state.phase = RequestPhase.LOADING
        self.headroom.on_load_begun(request.request_id, tokens_after_load, request.num_tokens)

    def ended(self, state: RequestState[Any], request_id: str, *, failed: bool) -> None:
        """Record that all loads of a request have ended."""
        if failed:
            state.phase = RequestPhase.FAILED
            self.headroom.forget(request_id)
            return
        state.phase = RequestPhase.SERVED
        state.bidding.on_succeeded()
        self._loaded[request_id] = state.bidding

    @property
    def agenda(self) -> tuple[Sized, ...]:
        return self._loaded, self.headroom

    def scheduled(self, requests: Container[str]) -> None:
        """Record that the engine's coming step computes tokens of these requests.

        No blocks are kept free for them any more, and their successful attempts are given back.
        """
        self.headroom.on_resumed(requests)
        for name in [name for name in self._loaded if name in requests]:
            self._loaded.pop(name).on_computed()

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self.headroom.forget(request_id)
        self._loaded.pop(request_id, None)
