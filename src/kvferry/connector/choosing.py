"""The choice for a request: load a source's KV, wait for a source, or compute the prompt.

    LocalPrefix   the tokens that the engine's own prefix cache has
    Bid           tokens beyond them that a source, or two sources together, offer to load
    RequestState  the phase of the request, its attempts, excluded sources, and how long it has waited
    Choice        the bid to load or to wait for, or none, and why

`BidChooser.choose` is the decision. It reads the first three, and changes nothing. A request waits for a
source that is still looking only if

- the request came with a ticket for more tokens than the best answer has (`Bid.promised`), or
- no source that has answered has a bid that is better than computing, or
- the answer is expected to save more time than it takes, and either the policy estimates times (``cost``) or
  the source answers within milliseconds (`Bid.within_seconds`).

Only patience limits the wait for a ticket. Every other wait ends when it has taken as long as what it could
save: no request waits longer than the engine would take to compute its prompt, once that speed is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Literal, TypeAlias

from kvferry.common.units import counted
from kvferry.connector.bids import Bid, Speeds
from kvferry.connector.engine import PrefixCache, Request
from kvferry.connector.events import DecisionReason, MissReason, ValuedBid


@dataclass(frozen=True, slots=True)
class LocalPrefix:
    """The part of a request's prompt that is in the engine's own prefix cache."""

    tokens: int  # number of tokens whose attention blocks the engine has
    # Number of tokens after which the engine can continue without a load; at most `tokens`. It is less if the
    # engine lacks the recurrent state after `tokens`.
    resumable_tokens: int

    @classmethod
    def of(cls, cache: PrefixCache | None, request: Request, tokens: int) -> LocalPrefix:
        """Ask the prefix cache after how many of `tokens` tokens the engine can continue; None for all."""
        if cache is None or not tokens:
            return cls(tokens, tokens)
        return cls(tokens, min(tokens, cache.resumable_tokens(request)))

    @property
    def needs_load(self) -> bool:
        return self.resumable_tokens < self.tokens


def last_boundary_before(end: int, alignment_tokens: int) -> int:
    """Return the position of the last block boundary before the last token of a prefix of `end` tokens.

    >>> last_boundary_before(512, 128), last_boundary_before(500, 128), last_boundary_before(513, 128)
    (384, 384, 512)
    """
    return (end - 1) // alignment_tokens * alignment_tokens


def saves_computation(missing_tokens: int) -> bool:
    """Return whether a load could save computing any of the tokens that are not in the prefix cache."""
    # The engine always computes the last token, to sample from it.
    return missing_tokens > 1


def must_compute(request: Request, local_tokens: int) -> tuple[MissReason, str] | None:
    """Return why the engine must compute a request, with a text for people; None if it may load KV."""
    if (why := request.cache_refusal) is not None:
        return MissReason.SKIPPED, f"{why}, so the engine computes the whole prompt"
    if saves_computation(request.num_tokens - local_tokens):
        return None
    if local_tokens:
        return (
            MissReason.LOCAL,
            f"{local_tokens} of {counted(request.num_tokens, 'token')} here, and the last is always computed",
        )
    return MissReason.SHORT_PROMPT, "its only token is always computed"


class RequestPhase(Enum):
    """The phase of a request whose KV may be loaded. `RequestState` draws the transitions."""

    OPEN = "a source may be chosen"
    LOADING = "it waits for its loads"
    FAILED = "a load has failed"
    RETRYING = "a source may be chosen, after a load has failed"
    SERVED = "it waits for no load"


@dataclass(slots=True, kw_only=True)
class RequestState:
    """The state of one request whose KV may be loaded, and every transition of its phase.

        OPEN ─admitted with a load─▶ LOADING ─all loaded─▶ SERVED
          │                             └─one failed─▶ FAILED ─others pass it once─▶ RETRYING
          └─admitted without a load─▶ SERVED ─preempted, admitted anew─▶ OPEN

    RETRYING goes on like OPEN, but a bid that does not find enough blocks at once is not waited for.
    All times are monotonic seconds.
    """

    attempts: int  # number of attempts that are left to load the request's KV
    # Why a source is not used for this request any more, by the source's name in bids. The sources add to it.
    excluded: dict[str, str] = field(default_factory=dict)
    phase: RequestPhase = RequestPhase.OPEN
    proposed: Bid | None = None  # bid that the engine was last asked to load; None if there is none
    # Number of the request's tokens in the engine's prefix cache when `proposed` was chosen.
    local_tokens: int = 0
    # True if there was no room for the loads of `proposed`: they would leave too few blocks free, or exceed
    # the number of blocks that their source may hold.
    crowded: bool = False
    # Bid that the request waits for, because its sources are still looking up their KV or there is no room;
    # None if the request does not wait.
    awaited: Bid | None = None
    _succeeded: int = 0
    _waited_seconds: float = 0.0
    _waits_since: float | None = None
    _asked_at: dict[str, float] = field(default_factory=dict)

    def begin_admission(self) -> RequestPhase:
        """Record that the engine wants to admit the request; return the phase until now."""
        # vLLM queues a request whose load has failed before requests whose loads hold blocks, and keeps
        # blocks reserved for the failed load. If the request needed more blocks than are left, neither it
        # nor the others would ever go on. So it lets the others pass once. If its next bid does not find
        # enough blocks at once, its prompt is computed, for which vLLM reserves nothing.
        before = self.phase
        if before is RequestPhase.FAILED:
            self.phase = RequestPhase.RETRYING
        elif before is RequestPhase.SERVED:
            self.phase = RequestPhase.OPEN
        return before

    def exclusion_reason(self, bid: Bid) -> str:
        """Return why a bid may not be taken: one of its sources is excluded. Empty if it may."""
        if self.excluded:
            for source in bid.sources:
                if source in self.excluded:
                    return self.excluded[source]
        return ""

    def waited_seconds(self, now: float) -> float:
        """Return how long the request has waited for a source or for blocks."""
        return self._waited_seconds + (0.0 if self._waits_since is None else now - self._waits_since)

    def end_wait(self, unanswered: AbstractSet[str], speeds: Speeds, now: float) -> None:
        """End a wait, as the sources have been asked again. Record how long answers took."""
        self._waited_seconds, self._waits_since = self.waited_seconds(now), None
        for name in self._asked_at.keys() - unanswered:
            speeds.record_answer(name, now - self._asked_at.pop(name))
        for name in unanswered:
            self._asked_at.setdefault(name, now)

    def propose(
        self, bid: Bid | None, local_tokens: int, now: float, *, crowded: bool, patience_seconds: float
    ) -> int | None:
        """Return the number of tokens to load beyond `local_tokens`; 0 to compute the prompt.

        Return None while the request waits for free blocks, or for a source that is still looking up its KV.
        """
        self.awaited = None
        if bid is None:
            self.proposed = None
            return 0
        if not bid.looking:
            self.proposed, self.local_tokens, self.crowded = bid, local_tokens, crowded
            if not crowded:
                return bid.tokens
            if self._waited_seconds >= patience_seconds:
                return 0
        self.awaited, self._waits_since = bid, now
        return None

    def admit(self, load_tokens: int, speeds: Speeds, now: float, *, waits: bool = True) -> Bid | None:
        """Record that the engine has allocated blocks to the request; return the bid to load, if any.

        The engine expects `load_tokens` tokens to be loaded. `waits` is False if the request goes on.
        """
        for name, since in self._asked_at.items():
            speeds.record_unanswered(name, now - since)
        self._asked_at.clear()
        bid, self.proposed = self.proposed, None
        self.phase = RequestPhase.SERVED
        if not load_tokens or bid is None:
            return None
        self.attempts -= 1
        if waits:
            self.phase = RequestPhase.LOADING
        return bid

    def on_loaded(self) -> None:
        # The attempt is given back only by `on_computed`: a load after which nothing is computed could repeat
        # without end.
        self.phase = RequestPhase.SERVED
        self._succeeded += 1

    def on_failed(self) -> None:
        self.phase = RequestPhase.FAILED

    def on_computed(self) -> None:
        """Give back the attempts that succeeded: the engine computes tokens of the request."""
        # A request that is preempted later may have to load its KV again, and needs attempts for that.
        self.attempts, self._succeeded = self.attempts + self._succeeded, 0


PolicyName: TypeAlias = Literal["weight", "cost", "first"]
"""The values of ``source_policy``."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What to do with a request, and why."""

    # Bid to load or, if its sources are still looking up their KV, to wait for; None to compute.
    bid: Bid | None
    why: DecisionReason
    bids: tuple[ValuedBid, ...]  # all bids, with their values
    compute_value: float  # value of computing the prompt
    unanswered: frozenset[str]  # names of the answers that bids wait for


# Without a margin, requests that wait for free blocks would switch back and forth between sources.
MARGIN = 1.1
"""Factor by which the value of another bid must exceed the value of the bid chosen before."""


@dataclass(frozen=True, slots=True)
class BidChooser:
    """Chooses between sources' bids by a policy, and limits how long a request waits for a bid.

    Attributes:
        policy: ``weight`` (the most tokens, each times the weight of its place), ``cost`` (the least expected
            seconds to the first token) or ``first`` (the bid of the first source).
        patience_seconds: maximum seconds that a request waits for free blocks, or for a source that is still
            looking up its KV.
        weights: weight of a token by place, for the policy ``weight``; 1 for a place without an entry.
    """

    policy: PolicyName
    speeds: Speeds
    patience_seconds: float
    weights: Mapping[str, float] = field(default_factory=dict)

    def choose(
        self,
        state: RequestState,
        bids: Iterable[tuple[str, Bid]],
        missing_tokens: int,
        computed_tokens: int,
        now: float,
    ) -> Choice:
        """Choose the bid of the highest value; none if computing is better.

        Args:
            state: state of the request; not changed.
            bids: bids in the order of their sources, with the sources' names in events.
            missing_tokens: number of the request's tokens after the prefix that the bids extend.
            computed_tokens: number of tokens that the engine computes if no bid is taken. It is larger if the
                engine can use a part of its prefix cache only with a load.
        """
        may_load = state.attempts > 0 and saves_computation(missing_tokens)
        compute_value, waited = self.value(None, computed_tokens), state.waited_seconds(now)
        valued, eligible = list[ValuedBid](), list[ValuedBid]()
        unanswered = frozenset[str]()
        for source, bid in bids:
            excluded = state.exclusion_reason(bid)
            value = 0.0 if excluded else self.value(bid, missing_tokens)
            valued.append(one := ValuedBid(source, bid, value, excluded))
            if may_load and not excluded and bid.tokens > 0:
                eligible.append(one)
                unanswered |= bid.unanswered
        best = _best([one for one in eligible if not one.bid.looking], state.proposed, compute_value)
        answered, rivals = None if best is None else best.bid, list[ValuedBid]()
        for one in eligible:
            if one is best or (
                one.bid.looking
                and waited < self._wait_seconds(one.bid, answered, missing_tokens, computed_tokens)
            ):
                rivals.append(one)
        best = _best(rivals, state.proposed, compute_value)
        why = _why(valued, best, compute_value, attempts=state.attempts)
        return Choice(None if best is None else best.bid, why, tuple(valued), compute_value, unanswered)

    def value(self, bid: Bid | None, missing_tokens: int) -> float:
        """Return the value of a bid, or of computing for None, 0 or more: twice the value is twice as good.

        `missing_tokens` is the number of the request's tokens after the prefix that the bid extends.
        """
        if self.policy == "cost":
            return 1 / max(self._seconds(bid, missing_tokens), 1e-9)
        if bid is None:
            return 0.0
        if self.policy == "first":
            return 1.0
        if bid.head is not None and bid.tail is not None:
            first, last = self.value(bid.head, missing_tokens), self.value(bid.tail, missing_tokens)
            # A source of weight 0 is never used, not even for a part.
            return first + last if first and last else 0.0
        value = 0.0
        for part in bid.parts:
            value += part.tokens * self.weights.get(part.place, 1.0)
        return value

    def _seconds(self, bid: Bid | None, missing_tokens: int) -> float:
        """Return the expected seconds to the first token."""
        loading = 0.0
        for part in () if bid is None else bid.parts:
            loading = max(loading, self.speeds.load_seconds(part.place, part.tokens))
            missing_tokens -= part.tokens
        return loading + self.speeds.compute_seconds(missing_tokens)

    def _wait_seconds(
        self, bid: Bid, answered: Bid | None, missing_tokens: int, computed_tokens: int
    ) -> float:
        """Return how long a request may wait, in all, for a bid whose sources are still looking.

        `answered` is the best bid of the sources that have answered; None if computing is better.
        """
        more_tokens = computed_tokens if answered is None else bid.tokens - answered.tokens
        # Another engine has computed a ticket's tokens for this request, so only patience limits the wait.
        if bid.promised:
            return self.patience_seconds if more_tokens > 0 else 0.0
        if self.policy == "cost" or bid.within_seconds:
            other = self._seconds(answered, computed_tokens if answered is None else missing_tokens)
            saved = other - self._seconds(bid, missing_tokens)
            expected = max(map(self.speeds.answer_seconds, bid.unanswered), default=0.0)
            longest = min(bid.within_seconds or self.patience_seconds, self.patience_seconds)
            return min(saved, longest) if expected < saved else 0.0
        if answered is not None:
            return 0.0
        # Without a measured speed nothing tells what the wait could save.
        if not self.speeds.computing_is_known:
            return self.patience_seconds
        return min(self.speeds.compute_seconds(computed_tokens), self.patience_seconds)


def _best(bids: Sequence[ValuedBid], before: Bid | None, compute_value: float) -> ValuedBid | None:
    """Return the bid of the highest value, the first of equals; None if computing is better.

    A bid of the same sources and places as `before` wins unless another has `MARGIN` times its value.
    """
    best = max(bids, key=attrgetter("value"), default=None)
    for one in bids:
        if best is not None and one.bid.has_same_sources(before) and one.value * MARGIN >= best.value:
            best = one
    return best if best is not None and best.value > compute_value else None


def _why(
    bids: Sequence[ValuedBid], best: ValuedBid | None, compute_value: float, *, attempts: int
) -> DecisionReason:
    if best is not None and best.bid.looking:
        return DecisionReason.LOOKING
    least, answered, passed_over = compute_value if best is None else best.value, False, False
    for one in bids:
        answered |= not one.excluded and not one.bid.looking
        passed_over |= one.bid.looking and one.value > least
    if best is not None:
        return DecisionReason.ANSWERED if passed_over else DecisionReason.BEST
    if bids and attempts <= 0:
        return DecisionReason.ATTEMPTS
    if answered:
        return DecisionReason.COMPUTING
    return DecisionReason.UNANSWERED if passed_over else DecisionReason.NOTHING
