"""Bids of sources for a request. A source that failed is struck out, and the others bid again.

The engine admits a request anew after a failed load. It then takes the best bid that is left (`policies`),
and computes the prompt if there is none.

    (new) ─take─▶ LOADING ─succeeded─▶ SERVED ─computed─▶ (─preempted─▶ take)
                     └─failed─▶ (source struck out) ─take─▶ … until no bid or no attempt is left: recompute

Two rules bound the admissions of a request, whatever sources offer:

- The engine always computes the last token, to sample from it. So a load must bring an earlier token. Of a
  load of everything the engine drops the last token, and asks again if only that one is left.
- Attempts are capped. A load that succeeded returns its attempt only when the engine has computed tokens
  after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """The tokens of a bid that come from one place.

    Attributes:
        place: ``peer``, or the name of a tier.
        tokens: number of tokens.
    """

    place: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Bid:
    """An offer of a source to load tokens of a request.

    Attributes:
        source: its name.
        parts: the tokens beyond those that the engine has, by place.
        looking: the source does not know yet; `parts` are then an upper bound.
        head: the bid of another source for the first of `parts`; None if this source brings all.
    """

    source: str
    parts: tuple[Part, ...]
    looking: bool = False
    head: Bid | None = None

    @classmethod
    def composed(cls, head: Bid, tail: Bid) -> Bid:
        """Return the bid whose beginning is `head` and whose rest is `tail`."""
        return cls(tail.source, head.parts + tail.parts, head.looking or tail.looking, head)

    @property
    def tokens(self) -> int:
        """Tokens of all parts."""
        return sum(part.tokens for part in self.parts)

    @property
    def places(self) -> frozenset[str]:
        """Places of all parts."""
        return frozenset(part.place for part in self.parts)

    @property
    def legs(self) -> tuple[tuple[Part, ...], ...]:
        """The parts of each source, in the order of the prompt."""
        return (self.parts,) if self.head is None else (self.head.parts, self.parts[len(self.head.parts) :])

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of all sources, in the order of the prompt."""
        return (self.source,) if self.head is None else (*self.head.sources, self.source)

    def like(self, other: Bid | None) -> bool:
        """Return whether both bids come from the same places of the same sources."""
        return other is not None and (self.sources, self.places) == (other.sources, other.places)


def leads_on(rest: int) -> bool:
    """Return whether a load could bring a request further.

    Args:
        rest: tokens of the request that the engine does not have.
    """
    return rest > 1


class Bidding:
    """The bids of one request over its attempts."""

    def __init__(self, attempts: int) -> None:
        self._left = attempts
        self._struck: dict[str, str] = {}
        self._brought = 0

    def open(self, bids: Iterable[Bid], rest: int) -> list[Bid]:
        """Return the bids that may be taken.

        Args:
            bids: those of all sources.
            rest: tokens of the request that the engine does not have; it always computes the last one.
        """
        if self._left <= 0 or not leads_on(rest):
            return []
        return [bid for bid in bids if bid.tokens > 0 and self._struck.keys().isdisjoint(bid.sources)]

    @property
    def spent(self) -> bool:
        """Whether no attempt is left."""
        return self._left <= 0

    def take(self) -> int:
        """Spend an attempt; return how many are left."""
        self._left -= 1
        return self._left

    def succeeded(self) -> None:
        """Note that the load of this attempt succeeded."""
        self._brought += 1

    def computed(self) -> None:
        """Return the attempts that succeeded, because the engine computes tokens of the request.

        So a request that is preempted may be served again.
        """
        self._left, self._brought = self._left + self._brought, 0

    def strike(self, source: str, reason: str) -> bool:
        """Strike a source out for this request; return whether it was not struck out before."""
        if source in self._struck:
            return False
        self._struck[source] = reason
        return True

    def why(self, source: str) -> str | None:
        """Return why a source was struck out, None if it was not."""
        return self._struck.get(source)
