"""The phases of requests whose KV cache may be loaded, and all transitions between them.

    OPEN ─admitted, waits for loads─▶ LOADING ─all loaded─▶ SERVED
      │                                  └─one failed─▶ FAILED ─lets others pass once─▶ OPEN ─▶ …
      └─admitted, waits for nothing─▶ SERVED ─preempted, admitted anew─▶ OPEN

At each admission the caller asks for the request's `standing`. On ASK it collects plans, takes the `best` one
and gives the engine the answer of `propose`. Once the engine has blocks, `admit` begins what was proposed,
`wait` notes that the request waits for loads, and `ended` that these have ended.

vLLM queues a request whose load failed before requests whose loads hold blocks, and keeps blocks reserved for
the failed load. If it needed more blocks than are left, neither it nor the others would ever go on. So it
stands aside once. If the next plan finds no room at once, the prompt is computed, for which vLLM reserves
nothing. A load also waits if it would leave too little `headroom` for requests that wait, or if its source
has no room. When the request's patience is over, the prompt is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

from kvferry.connector.bids import Bid, Bidding
from kvferry.connector.engine import Request
from kvferry.connector.headroom import Headroom
from kvferry.connector.policies import Choice
from kvferry.connector.waiting import Waiting


class RequestPhase(Enum):
    """How far the load of a request is."""

    OPEN = "open"
    LOADING = "loading"
    FAILED = "failed"
    SERVED = "served"


class Standing(Enum):
    """What becomes of a request at an admission."""

    ASK = "its sources are asked for plans"
    LOADING = "nothing more is loaded: its loads are under way"
    ASIDE = "its load has failed: others pass it, and it is admitted later"
    NO_ROOM = "it is computed: the plan after a failed load has found no blocks"


class Plan(Protocol):
    """A way to load a prefix."""

    @property
    def bid(self) -> Bid:
        """The bid of its sources."""


PlanT = TypeVar("PlanT", bound=Plan)


@dataclass(slots=True)
class RequestState(Generic[PlanT]):
    """One request.

    Attributes:
        bidding: its bids and attempts.
        phase: as drawn above.
        taken: the plan last proposed to the engine, and the tokens that the engine had then.
        crowded: there was no room for `taken`.
        failed: the last attempt has failed.
        waiting: time spent waiting for room, or for sources that were looking.
    """

    bidding: Bidding
    phase: RequestPhase = RequestPhase.OPEN
    taken: tuple[PlanT, int] | None = None
    crowded: bool = False
    failed: bool = False
    waiting: Waiting = field(default_factory=Waiting)


class RequestPhases:
    """Moves requests from phase to phase: mutates the states given. Only the engine's thread calls it.

    Attributes:
        headroom: blocks to leave for requests that wait.
    """

    def __init__(self, choice: Choice, headroom: Headroom, clock: Callable[[], float]) -> None:
        """Begin.

        Args:
            choice: chooses between bids.
            headroom: as in the attributes.
            clock: monotonic seconds.
        """
        self.headroom = headroom
        self._choice, self._clock = choice, clock
        self._brought: dict[str, Bidding] = {}

    def standing(self, state: RequestState[Any]) -> Standing:
        """Return what becomes of a request that the engine would admit."""
        if state.phase is RequestPhase.LOADING:
            return Standing.LOADING
        if state.phase is RequestPhase.FAILED:
            state.phase, state.failed = RequestPhase.OPEN, True
            return Standing.ASIDE
        if state.failed and state.taken is not None:
            return Standing.NO_ROOM
        state.phase = RequestPhase.OPEN
        return Standing.ASK

    def best(
        self, state: RequestState[PlanT], plans: Sequence[PlanT], request: Request, local_tokens: int
    ) -> PlanT | None:
        """Return the plan to take, or the one to wait for; None to compute.

        Args:
            state: of the request.
            plans: in the order of their sources.
            request: the request.
            local_tokens: tokens that the engine has.
        """
        rest = request.num_tokens - local_tokens
        best = self._choice.of(
            state.bidding.open((plan.bid for plan in plans), rest),
            rest,
            waited=state.waiting.until(self._clock()),
            before=None if state.taken is None else state.taken[0].bid,
        )
        return next((plan for plan in plans if plan.bid is best), None)

    def propose(
        self,
        state: RequestState[PlanT],
        plan: PlanT | None,
        local_tokens: int,
        has_room: Callable[[PlanT], bool],
    ) -> int | None:
        """Return the tokens to load beyond `local_tokens`; None while the request waits for its plan or room.

        Args:
            state: of the request.
            plan: the `best` one.
            local_tokens: tokens that the engine has.
            has_room: whether the loads of a plan leave the blocks that others need.
        """
        if plan is None:
            state.taken = None
            return 0
        if not plan.bid.looking:
            state.taken, state.crowded = (plan, local_tokens), not has_room(plan)
            if not state.crowded:
                return plan.bid.tokens
            if state.waiting.seconds >= self._choice.patience_seconds:
                return 0
        state.waiting.begin(self._clock())
        return None

    def admit(self, state: RequestState[PlanT], external: int) -> tuple[PlanT, int] | None:
        """Admit a request that has blocks now; spend an attempt if it is to load.

        Returns:
            The plan to begin, and the tokens that the engine had when it was proposed; None to load nothing.
        """
        taken, state.taken, state.failed = state.taken, None, False
        state.phase = RequestPhase.SERVED
        if not external or taken is None:
            return None
        state.bidding.take()
        return taken

    def wait(self, state: RequestState[Any], request: Request, total: int) -> None:
        """Note that an admitted request waits for loads, after which the engine has `total` tokens."""
        state.phase = RequestPhase.LOADING
        self.headroom.loads(request.request_id, total, request.num_tokens)

    def ended(self, state: RequestState[Any], request_id: str, *, failed: bool) -> None:
        """Note that all loads of a request have ended."""
        if failed:
            state.phase = RequestPhase.FAILED
            self.headroom.forget(request_id)
            return
        state.phase = RequestPhase.SERVED
        state.bidding.succeeded()
        self._brought[request_id] = state.bidding

    def scheduled(self, requests: Container[str]) -> None:
        """Note the requests that the coming step computes tokens of."""
        self.headroom.go_on(requests)
        for name in [name for name in self._brought if name in requests]:
            self._brought.pop(name).computed()

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self.headroom.forget(request_id)
        self._brought.pop(request_id, None)
