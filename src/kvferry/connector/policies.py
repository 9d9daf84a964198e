"""Policies that choose a request's bid, or choose to compute its prompt.

- ``first``: the bid of the first source that has one.
- ``weight``: the bid with the largest sum of tokens times the weight of their place. A place is ``peer`` or a
  tier. Of equal bids, the first.
- ``cost``: the bid with the least expected time to the first token, from measured speeds (`speeds`): until
  the slowest place has delivered its tokens and the rest of the prompt is computed. Computing the whole
  prompt competes as one of the bids.

If the best bid belongs to a source that is still looking, the request waits for it, but not beyond its
patience. The bid chosen before stays chosen until another one is better by a margin. So requests that wait
for free blocks do not switch back and forth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from kvferry.connector.bids import Bid
from kvferry.connector.speeds import Speeds

PolicyName: TypeAlias = Literal["weight", "cost", "first"]
"""The values of ``source_policy``."""

MARGIN = 1.1
"""Factor by which the value of another bid must exceed the value of the bid chosen before."""


class Policy(Protocol):
    """A policy that assigns a value to each bid (a source's offer to load tokens), to choose the best."""

    def value(self, bid: Bid | None, missing_tokens: int) -> float:
        """Return the value of a bid (a source's offer to load tokens): 0 or more, the higher the better.

        A bid of twice the value is twice as good.

        Args:
            bid: the bid; None for computing all tokens.
            missing_tokens: number of the request's tokens that are not in the engine's prefix cache.
        """


class FirstPolicy:
    """Policy that gives all bids the same value, so that the bid of the first source is chosen."""

    def value(self, bid: Bid | None, missing_tokens: int) -> float:
        """Return 1 for every bid, and 0 for computing all tokens.

        Args:
            bid: the bid (a source's offer to load tokens); None for computing.
            missing_tokens: number of the request's tokens that are not in the engine's prefix cache; ignored.
        """
        del missing_tokens
        return 0.0 if bid is None else 1.0


class WeightPolicy:
    """Policy that values a bid (a source's offer) by its tokens; the place of each token sets its weight."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        """Create the policy from the weights of the places that tokens come from.

        Args:
            weights: maps the name of a place (such as ``peer`` or a tier) to the weight of each token that is
                loaded from it. A place without an entry has weight 1.
        """
        self._weights = dict(weights)

    def value(self, bid: Bid | None, missing_tokens: int) -> float:
        """Return the sum of the weights of the bid's tokens; 0 for computing.

        A source whose tokens all have weight 0 is never used: a bid with such a source has value 0.

        Args:
            bid: the bid (offer of one or two sources to load tokens); None for computing.
            missing_tokens: number of the request's tokens that are not in the engine's prefix cache; ignored.
        """
        del missing_tokens
        if bid is None:
            return 0.0
        values = [
            sum(part.tokens * self._weights.get(part.place, 1.0) for part in parts)
            for parts in bid.parts_by_source
        ]
        return sum(values) if all(values) else 0.0  # a source of weight 0 is never used, not even for a part


class CostPolicy:
    """Policy that values a bid by the inverse of the expected time to the first token."""

    def __init__(self, speeds: Speeds) -> None:
        """Create the policy from measured speeds.

        Args:
            speeds: measured speeds of loading from each place, and of computing.
        """
        self._speeds = speeds

    def value(self, bid: Bid | None, missing_tokens: int) -> float:
        """Return the inverse of the expected seconds to load the bid's tokens and compute the remaining ones.

        The places of a bid load in parallel, so only the slowest place counts.

        Args:
            bid: the bid (a source's offer to load tokens); None for computing all tokens.
            missing_tokens: number of the request's tokens that are not in the engine's prefix cache.
        """
        parts = () if bid is None else bid.parts
        loading = max((self._speeds.load_seconds(part.place, part.tokens) for part in parts), default=0.0)
        left = missing_tokens - sum(part.tokens for part in parts)
        seconds = loading + self._speeds.compute_seconds(left)
        return 1 / max(seconds, 1e-9)


def policy_named(name: PolicyName, weights: Mapping[str, float], speeds: Speeds) -> Policy:
    """Return the policy with a configured name.

    Args:
        name: value of the setting ``source_policy``.
        weights: maps the name of a place (such as ``peer`` or a tier) to the weight of each token that is
            loaded from it, for `WeightPolicy`. A place without an entry has weight 1.
        speeds: measured speeds of loading and computing, for `CostPolicy`.
    """
    policies: dict[str, Policy] = {
        "weight": WeightPolicy(weights),
        "cost": CostPolicy(speeds),
        "first": FirstPolicy(),
    }
    return policies[name]


@dataclass(frozen=True, slots=True)
class BidChooser:
    """Chooses between sources' offers by a policy, and limits how long a request waits for an offer.

    Attributes:
        policy: policy that assigns a value to each offer.
        speeds: record of measured speeds. The admission adds the time of each load to it.
        patience_seconds: maximum seconds that a request waits for free blocks, or for a source that is still
            looking up its KV.
    """

    policy: Policy
    speeds: Speeds
    patience_seconds: float

    def choose(
        self,
        bids: Sequence[Bid],
        missing_tokens: int,
        *,
        waited: float,
        before: Bid | None,
        computed_tokens: int | None = None,
    ) -> Bid | None:
        """Return the bid (a source's offer to load tokens) to take; None if the engine computes the prompt.

        If the source of the returned bid is still looking up its KV, the request waits for this source.

        Args:
            bids: bids in the order of their sources, each of at least one token.
            missing_tokens: number of the request's tokens that are not in the engine's prefix cache.
            waited: seconds that the request has waited so far.
            before: bid that was chosen for this request last time; None if there is none. A bid of the same
                sources and places wins unless another bid has more than `MARGIN` times its value.
            computed_tokens: number of tokens that the engine computes if no bid is taken; None for
                `missing_tokens`.
        """
        return choose(
            self.policy,
            bids,
            missing_tokens,
            waits=waited < self.patience_seconds,
            before=before,
            computed_tokens=computed_tokens,
        )


def choose(
    policy: Policy,
    bids: Sequence[Bid],
    missing_tokens: int,
    *,
    waits: bool,
    before: Bid | None = None,
    computed_tokens: int | None = None,
) -> Bid | None:
    """Return the bid (a source's offer to load tokens) to take; None if the engine computes the prompt.

    If the source of the returned bid is still looking up its KV, the request waits for this source.

    >>> from kvferry.connector.bids import PlaceTokens
    >>> disk, host = Bid("a", (PlaceTokens("file", 300),)), Bid("b", (PlaceTokens("host", 256),))
    >>> choose(WeightPolicy({"file": 0.5}), [disk, host], 400, waits=False).source  # 300 * 0.5 < 256
    'b'

    Args:
        policy: policy that assigns a value to each bid.
        bids: bids in the order of their sources, each of at least one token.
        missing_tokens: number of the request's tokens that are not in the engine's prefix cache.
        waits: True if the request may wait for a source that is still looking up its KV. Otherwise the bids
            of such sources are ignored.
        before: bid that was chosen for this request last time; None if there is none. A bid of the same
            sources and places wins unless another bid has more than `MARGIN` times its value.
        computed_tokens: number of tokens that the engine computes if no bid is taken; None for
            `missing_tokens`. It is larger if the engine can use a part of its prefix cache only with a load.
    """
    values = [(policy.value(bid, missing_tokens), bid) for bid in bids if waits or not bid.looking]
    most, best = max(values, key=lambda one: one[0], default=(0.0, None))
    for value, bid in values:
        if bid.has_same_sources(before) and value * MARGIN >= most:
            most, best = value, bid
    computed_tokens = missing_tokens if computed_tokens is None else computed_tokens
    return best if most > policy.value(None, computed_tokens) else None
