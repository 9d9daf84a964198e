"""The choice between the bids for a request, computing its prompt, and waiting for a source's answer.

Sources that have answered are used at once. A request waits for a source that is still looking only if

- the request came with a ticket for more tokens than the best answer has (`Bid.promised`), or
- no source that has answered has a bid that is better than computing, or
- the policy estimates times, and the answer is expected to save more time than it takes.

Another engine has computed a ticket's tokens for this request, so only patience limits the wait for it. The
source withdraws the bid if the ticket's engine refuses it or is gone. Every other wait ends when it has taken
as long as what it could save: no request waits longer than the engine would take to compute its prompt, once
the speed of computing is known, and none beyond its patience.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from kvferry.connector.load import Bid
from kvferry.connector.speeds import AnswerTimes, Speeds

PolicyName: TypeAlias = Literal["weight", "cost", "first"]
"""The values of ``source_policy``."""


class Policy(Protocol):
    """Assigns a value to each bid, to choose the best."""

    def value(self, bid: Bid | None, missing_tokens: int) -> float:
        """Return the value of a bid, 0 or more: a bid of twice the value is twice as good.

        Args:
            bid: None for computing all tokens.
            missing_tokens: number of the request's tokens that are not in the engine's prefix cache.
        """

    def saved_seconds(
        self, bid: Bid, instead: Bid | None, missing_tokens: int, computed_tokens: int
    ) -> float | None:
        """Return the seconds by which a bid is expected to give the first token sooner than another one.

        Return None if this policy estimates no times.

        Args:
            instead: the other bid; None for computing.
            missing_tokens: number of the request's tokens that are not in the engine's prefix cache.
            computed_tokens: number of tokens that the engine computes if no bid is taken.
        """


class _TimelessPolicy:
    """Base of policies that estimate no times."""

    def saved_seconds(self, bid: Bid, instead: Bid | None, missing_tokens: int, computed_tokens: int) -> None:
        del bid, instead, missing_tokens, computed_tokens


class FirstPolicy(_TimelessPolicy):
    """Gives all bids the same value, so that the bid of the first source is chosen."""

    def value(self, bid: Bid | None, missing_tokens: int) -> float:
        del missing_tokens
        return 0.0 if bid is None else 1.0


class WeightPolicy(_TimelessPolicy):
    """Values a bid by its tokens; the place of each token sets its weight."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        """Create the policy.

        Args:
            weights: weight of a token by place. A place without an entry has weight 1.
        """
        self._weights = dict(weights)

    def value(self, bid: Bid | None, missing_tokens: int) -> float:
        del missing_tokens
        if bid is None:
            return 0.0
        values = [
            sum(part.tokens * self._weights.get(part.place, 1.0) for part in parts)
            for parts in bid.parts_by_source
        ]
        return sum(values) if all(values) else 0.0  # a source of weight 0 is never used, not even for a part


class CostPolicy:
    """Values a bid by the inverse of the expected seconds to the first token."""

    def __init__(self, speeds: Speeds) -> None:
        self._speeds = speeds

    def value(self, bid: Bid | None, missing_tokens: int) -> float:
        return 1 / max(self._seconds(bid, missing_tokens), 1e-9)

    def saved_seconds(
        self, bid: Bid, instead: Bid | None, missing_tokens: int, computed_tokens: int
    ) -> float | None:
        other = self._seconds(instead, computed_tokens if instead is None else missing_tokens)
        return other - self._seconds(bid, missing_tokens)

    def _seconds(self, bid: Bid | None, missing_tokens: int) -> float:
        parts = () if bid is None else bid.parts
        loading = max((self._speeds.load_seconds(part.place, part.tokens) for part in parts), default=0.0)
        return loading + self._speeds.compute_seconds(missing_tokens - sum(part.tokens for part in parts))


def policy_named(name: PolicyName, weights: Mapping[str, float], speeds: Speeds) -> Policy:
    """Return the policy with a name of the setting ``source_policy``."""
    policies: dict[str, Policy] = {
        "weight": WeightPolicy(weights),
        "cost": CostPolicy(speeds),
        "first": FirstPolicy(),
    }
    return policies[name]


# Without a margin, requests that wait for free blocks would switch back and forth between sources.
MARGIN = 1.1
"""Factor by which the value of another bid must exceed the value of the bid chosen before."""


@dataclass(frozen=True, slots=True)
class BidChooser:
    """Chooses between sources' offers by a policy, and limits how long a request waits for an offer.

    Attributes:
        speeds: measured speeds. The admission adds the time of each load.
        patience_seconds: maximum seconds that a request waits for free blocks, or for a source that is still
            looking up its KV.
        answer_times: times until sources answer. The admission adds the time of each answer.
    """

    policy: Policy
    speeds: Speeds
    patience_seconds: float
    answer_times: AnswerTimes = field(default_factory=AnswerTimes)

    def choose(
        self,
        bids: Sequence[Bid],
        missing_tokens: int,
        *,
        waited: float,
        before: Bid | None,
        computed_tokens: int | None = None,
    ) -> Bid | None:
        """Return the bid to take; None if the engine computes the prompt.

        If the source of the returned bid is still looking up its KV, the request waits for this source.

        Args:
            bids: bids in the order of their sources, each of at least one token.
            before: bid that was chosen for this request last time; None if there is none. A bid of the same
                sources and places wins unless another bid has more than `MARGIN` times its value.
            computed_tokens: number of tokens that the engine computes if no bid is taken; None for
                `missing_tokens`. It is larger if the engine can use a part of its prefix cache only with a
                load.
        """
        computed = missing_tokens if computed_tokens is None else computed_tokens
        answered = choose(
            self.policy,
            [bid for bid in bids if not bid.looking],
            missing_tokens,
            before=before,
            computed_tokens=computed,
        )
        rivals = [
            bid
            for bid in bids
            if bid is answered
            or (bid.looking and waited < self.wait_seconds(bid, answered, missing_tokens, computed))
        ]
        return choose(self.policy, rivals, missing_tokens, before=before, computed_tokens=computed)

    def wait_seconds(
        self, bid: Bid, answered: Bid | None, missing_tokens: int, computed_tokens: int
    ) -> float:
        """Return how long a request may wait, in all, for a bid whose sources are still looking.

        Args:
            bid: bid whose sources are still looking. Its number of tokens is an upper bound.
            answered: best bid of the sources that have answered; None if computing is better.
        """
        more_tokens = computed_tokens if answered is None else bid.tokens - answered.tokens
        # Another engine has computed a ticket's tokens for this request, so only patience limits the wait.
        if bid.promised:
            return self.patience_seconds if more_tokens > 0 else 0.0
        saved = self.policy.saved_seconds(bid, answered, missing_tokens, computed_tokens)
        if saved is not None:
            expected = max(map(self.answer_times.seconds, bid.unanswered), default=0.0)
            return min(saved, self.patience_seconds) if expected < saved else 0.0
        if answered is not None:
            return 0.0
        # Without a measured speed nothing tells what the wait could save.
        if not self.speeds.computing_is_known:
            return self.patience_seconds
        return min(self.speeds.compute_seconds(computed_tokens), self.patience_seconds)


def choose(
    policy: Policy,
    bids: Sequence[Bid],
    missing_tokens: int,
    *,
    before: Bid | None = None,
    computed_tokens: int | None = None,
) -> Bid | None:
    """Return the bid of the highest value; None if computing is better.

    >>> from kvferry.connector.load import PlaceTokens
    >>> from kvferry.connector.choosing import WeightPolicy
    >>> disk, host = Bid("a", (PlaceTokens("file", 300),)), Bid("b", (PlaceTokens("host", 256),))
    >>> choose(WeightPolicy({"file": 0.5}), [disk, host], 400).source  # 300 * 0.5 < 256
    'b'

    Args:
        bids: bids in the order of their sources, each of at least one token.
        before: bid that was chosen for this request last time; None if there is none. A bid of the same
            sources and places wins unless another bid has more than `MARGIN` times its value.
        computed_tokens: number of tokens that the engine computes if no bid is taken; None for
            `missing_tokens`. It is larger if the engine can use a part of its prefix cache only with a load.
    """
    values = [(policy.value(bid, missing_tokens), bid) for bid in bids]
    most, best = max(values, key=lambda one: one[0], default=(0.0, None))
    for value, bid in values:
        if bid.has_same_sources(before) and value * MARGIN >= most:
            most, best = value, bid
    computed_tokens = missing_tokens if computed_tokens is None else computed_tokens
    return best if most > policy.value(None, computed_tokens) else None
