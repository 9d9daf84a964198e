"""Which source is asked, and which no longer is: strike out and bid again.

A source that failed a request is struck out for that request; the request is admitted anew and the best
bid that is left is taken, recompute at the latest. Attempts are capped, so that admission ends.

    (new) ─take─▶ LOADING ─succeeded─▶ SERVED (─preempted─▶ take)
                     └─failed─▶ (source struck out) ─take─▶ … until no bid or no attempt is left: recompute
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bid:
    """What a source offers a request.

    Attributes:
        source: its name.
        tokens: tokens beyond what is at hand locally; more is better.
        looking: it cannot say yet; `tokens` is then the most it may come to.
    """

    source: str
    tokens: int
    looking: bool = False


class Bidding:
    """The bids of one request over its attempts."""

    def __init__(self, attempts: int) -> None:
        self._left = attempts
        self._struck: dict[str, str] = {}

    def best(self, bids: Sequence[Bid]) -> Bid | None:
        """The bid to take: most tokens, first among equals; None means compute."""
        open_bids = [bid for bid in bids if bid.tokens > 0 and bid.source not in self._struck]
        if not open_bids or self._left <= 0:
            return None
        return max(open_bids, key=lambda bid: bid.tokens)

    def take(self) -> int:
        """An attempt is spent; returns its number, counting down from the cap."""
        self._left -= 1
        return self._left

    def succeeded(self) -> None:
        """An attempt that has brought something does not count: a preempted request may be served again."""
        self._left += 1

    def strike(self, source: str, reason: str) -> bool:
        """Ask this source no more; True if that is new."""
        if source in self._struck:
            return False
        self._struck[source] = reason
        return True

    def why(self, source: str) -> str | None:
        """Why a source was struck out, None if it was not."""
        return self._struck.get(source)
