"""What sources offer a request, and which are not asked any more: strike out and bid again.

A source that failed a request is struck out for that request; the request is admitted anew and the best
bid that is left is taken (`policies`), recompute at the latest.

    (new) ─take─▶ LOADING ─succeeded─▶ SERVED ─computed─▶ (─preempted─▶ take)
                     └─failed─▶ (source struck out) ─take─▶ … until no bid or no attempt is left: recompute

Two rules make admission end, whatever sources offer and whatever the engine does with it:

- The last token is always computed, to sample from it. So a load must bring a token before it. The engine
  cuts a load of everything by the last token, and a request of which nothing else is left asks again.
- Attempts are capped. A load that succeeded gives its attempt back only when the engine has computed
  something after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """What of a bid comes from one place.

    Attributes:
        place: ``peer``, or the name of a tier.
        tokens: how many.
    """

    place: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Bid:
    """What a source offers a request.

    Attributes:
        source: its name.
        parts: where the tokens come from that it has beyond what is at hand locally.
        looking: it cannot say yet; the parts are then the most it may come to.
        head: what another source brings of it, the first of the parts; None if this one brings all.
    """

    source: str
    parts: tuple[Part, ...]
    looking: bool = False
    head: Bid | None = None

    @classmethod
    def composed(cls, head: Bid, tail: Bid) -> Bid:
        """The beginning from one source, the rest from another."""
        return cls(tail.source, head.parts + tail.parts, head.looking or tail.looking, head)

    @property
    def tokens(self) -> int:
        """Of all parts."""
        return sum(part.tokens for part in self.parts)

    @property
    def places(self) -> frozenset[str]:
        """Of all parts."""
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
        """Whether both come from the same places of the same sources, however much."""
        return other is not None and (self.sources, self.places) == (other.sources, other.places)


def leads_on(rest: int) -> bool:
    """Whether a load could bring a request further.

    Args:
        rest: tokens of the request that are not at hand.
    """
    return rest > 1


class Bidding:
    """The bids of one request over its attempts."""

    def __init__(self, attempts: int) -> None:
        self._left = attempts
        self._struck: dict[str, str] = {}
        self._brought = 0

    def open(self, bids: Iterable[Bid], rest: int) -> list[Bid]:
        """Bids that may be taken.

        Args:
            bids: of all sources.
            rest: tokens of the request that are not at hand, the last of which is always computed.
        """
        if self._left <= 0 or not leads_on(rest):
            return []
        return [bid for bid in bids if bid.tokens > 0 and self._struck.keys().isdisjoint(bid.sources)]

    @property
    def spent(self) -> bool:
        """No attempt is left."""
        return self._left <= 0

    def take(self) -> int:
        """An attempt is spent; returns its number, counting down from the cap."""
        self._left -= 1
        return self._left

    def succeeded(self) -> None:
        """The load of this attempt has brought what it was to bring."""
        self._brought += 1

    def computed(self) -> None:
        """The engine computes tokens of the request: attempts that succeeded do not count any more.

        So a request that is preempted may be served again.
        """
        self._left, self._brought = self._left + self._brought, 0

    def strike(self, source: str, reason: str) -> bool:
        """Ask this source no more; True if that is new."""
        if source in self._struck:
            return False
        self._struck[source] = reason
        return True

    def why(self, source: str) -> str | None:
        """Why a source was struck out, None if it was not."""
        return self._struck.get(source)
