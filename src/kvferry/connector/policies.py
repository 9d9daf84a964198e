"""Policies that assign a value to each bid, to choose between them and computing the prompt (`choosing`).

- ``first``: the bid of the first source that has one.
- ``weight``: the bid with the largest sum of tokens times the weight of their place. A place is ``peer`` or a
  tier. Of equal bids, the first.
- ``cost``: the bid with the least expected time to the first token, from measured speeds (`speeds`): until
  the slowest place has delivered its tokens and the rest of the prompt is computed. Computing the whole
  prompt competes as one of the bids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol, TypeAlias

from kvferry.connector.bids import Bid
from kvferry.connector.speeds import Speeds

PolicyName: TypeAlias = Literal["weight", "cost", "first"]
"""The values of ``source_policy``."""


class Policy(Protocol):
    """A policy that assigns a value to each bid (a source's offer to load tokens), to choose the best."""

    def value(self, bid: Bid | None, missing_tokens: int) -> float:
        """Return the value of a bid (a source's offer to load tokens): 0 or more, the higher the better.

        A bid of twice the value is twice as good.

        Args:
            bid: the bid; None for computing all tokens.
            missing_tokens: number of the request's tokens that are not in the engine's prefix cache.
        """

    def saved_seconds(
        self, bid: Bid, instead: Bid | None, missing_tokens: int, computed_tokens: int
    ) -> float | None:
        """Return the expected seconds by which a bid gives the first token sooner than another bid.

        Return None if this policy estimates no times.

        Args:
            bid: the bid (a source's offer to load tokens).
            instead: the other bid; None for computing.
            missing_tokens: number of the request's tokens that are not in the engine's prefix cache.
            computed_tokens: number of tokens that the engine computes if no bid is taken.
        """


class _TimelessPolicy:
    """Base of policies that estimate no times."""

    def saved_seconds(self, bid: Bid, instead: Bid | None, missing_tokens: int, computed_tokens: int) -> None:
        """Return None: this policy estimates no times.

        Args:
            bid: the bid (a source's offer to load tokens); ignored.
            instead: another bid; ignored.
            missing_tokens: number of the request's tokens that are not in the engine's prefix cache; ignored.
            computed_tokens: number of tokens that the engine computes if no bid is taken; ignored.
        """
        del bid, instead, missing_tokens, computed_tokens


class FirstPolicy(_TimelessPolicy):
    """Policy that gives all bids the same value, so that the bid of the first source is chosen."""

    def value(self, bid: Bid | None, missing_tokens: int) -> float:
        """Return 1 for every bid, and 0 for computing all tokens.

        Args:
            bid: the bid (a source's offer to load tokens); None for computing.
            missing_tokens: number of the request's tokens that are not in the engine's prefix cache; ignored.
        """
        del missing_tokens
        return 0.0 if bid is None else 1.0


class WeightPolicy(_TimelessPolicy):
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
        return 1 / max(self._seconds(bid, missing_tokens), 1e-9)

    def saved_seconds(
        self, bid: Bid, instead: Bid | None, missing_tokens: int, computed_tokens: int
    ) -> float | None:
        """Return the expected seconds by which a bid gives the first token sooner than another bid.

        Args:
            bid: the bid (a source's offer to load tokens).
            instead: the other bid; None for computing.
            missing_tokens: number of the request's tokens that are not in the engine's prefix cache.
            computed_tokens: number of tokens that the engine computes if no bid is taken.
        """
        other = self._seconds(instead, computed_tokens if instead is None else missing_tokens)
        return other - self._seconds(bid, missing_tokens)

    def _seconds(self, bid: Bid | None, missing_tokens: int) -> float:
        parts = () if bid is None else bid.parts
        loading = max((self._speeds.load_seconds(part.place, part.tokens) for part in parts), default=0.0)
        return loading + self._speeds.compute_seconds(missing_tokens - sum(part.tokens for part in parts))


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
