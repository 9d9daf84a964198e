"""Which bid is taken: a pure choice among what sources offer, with computing as the last of them.

- ``first``: of the source that comes first, whatever others have.
- ``weight``: most tokens, each times the weight of the place that it comes from; the first of equals.
- ``cost``: the least time to the first token: until the slowest place has given its part and the rest of the
  prompt is computed, by what was measured (`speeds`). Computing all of it is one of the bids.

A bid of a source that is still looking is waited for if it would be taken, but not for longer than the caller
has patience. What was chosen before stays chosen until another is better by a margin, so that requests that
wait for room are not sent to and fro.
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
"""How many times better another bid must be than the one that was chosen before."""


class Policy(Protocol):
    """Values bids."""

    def value(self, bid: Bid | None, rest: int) -> float:
        """Return the value of a bid, above 0; twice the value is twice as good.

        Args:
            bid: None for computing everything.
            rest: tokens of the request that are not at hand locally.
        """


class First:
    """All bids are as good; the first wins."""

    def value(self, bid: Bid | None, rest: int) -> float:
        """See `Policy.value`."""
        del rest
        return 0.0 if bid is None else 1.0


class Weight:
    """Tokens times weight."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        """Args: weights: of places; 1 where none is given."""
        self._weights = dict(weights)

    def value(self, bid: Bid | None, rest: int) -> float:
        """See `Policy.value`."""
        del rest
        if bid is None:
            return 0.0
        values = [sum(part.tokens * self._weights.get(part.place, 1.0) for part in leg) for leg in bid.legs]
        return sum(values) if all(values) else 0.0  # what is never taken is not taken with something else


class Cost:
    """The inverse of the expected time to the first token."""

    def __init__(self, speeds: Speeds) -> None:
        """Args: speeds: measured."""
        self._speeds = speeds

    def value(self, bid: Bid | None, rest: int) -> float:
        """See `Policy.value`."""
        parts = () if bid is None else bid.parts
        loading = max((self._speeds.load_seconds(part.place, part.tokens) for part in parts), default=0.0)
        left = rest - sum(part.tokens for part in parts)
        seconds = loading + self._speeds.compute_seconds(left)
        return 1 / max(seconds, 1e-9)


def policy_named(name: PolicyName, weights: Mapping[str, float], speeds: Speeds) -> Policy:
    """Return the policy of a configured name.

    Args:
        name: the value of ``source_policy``.
        weights: of places, as in `Weight`.
        speeds: measured, as in `Cost`.
    """
    policies: dict[str, Policy] = {"weight": Weight(weights), "cost": Cost(speeds), "first": First()}
    return policies[name]


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy, and what it needs to know.

    Attributes:
        policy: how good bids are.
        speeds: to be told what loads and steps took.
        patience_seconds: how long a request waits for a source that is looking.
    """

    policy: Policy
    speeds: Speeds
    patience_seconds: float

    def of(self, bids: Sequence[Bid], rest: int, *, waited: float, before: Bid | None) -> Bid | None:
        """See `choose`.

        Args:
            bids, rest, before: as of `choose`.
            waited: seconds that the request has waited already.
        """
        return choose(self.policy, bids, rest, waits=waited < self.patience_seconds, before=before)


def choose(
    policy: Policy, bids: Sequence[Bid], rest: int, *, waits: bool, before: Bid | None = None
) -> Bid | None:
    """Return the bid to take; None to compute.

    >>> from kvferry.connector.bids import Part
    >>> disk, host = Bid("a", (Part("file", 300),)), Bid("b", (Part("host", 256),))
    >>> choose(Weight({"file": 0.5}), [disk, host], 400, waits=False).source
    'b'

    Args:
        policy: how good each is.
        bids: in the order of their sources, each with tokens.
        rest: tokens of the request that are not at hand locally.
        waits: a bid that is looking may be waited for; it is then what is returned.
        before: what was chosen for this request before.
    """
    values = [(policy.value(bid, rest), bid) for bid in bids if waits or not bid.looking]
    most, best = max(values, key=lambda one: one[0], default=(0.0, None))
    for value, bid in values:
        if bid.like(before) and value * MARGIN >= most:
            most, best = value, bid
    return best if most > policy.value(None, rest) else None
