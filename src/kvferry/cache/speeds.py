"""How fast places give tokens, and how fast the engine computes them, as measured here lately."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvferry.cache.bids import Part

NEWEST = 0.3
"""What the newest measurement counts; those before it share the rest."""

LATELY_SECONDS = 120.0
"""A place that was not measured for so long is tried anew: it may be faster by now."""

COMPUTED = "computed"


class Speeds:
    """Tokens per second, by place. What is not known costs nothing: it is tried, and then it is known."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rates: dict[str, tuple[float, float]] = {}

    def loaded(self, parts: Sequence[Part], seconds: float) -> None:
        """A load has brought this: the place that was expected to take longest, or an unknown one, did."""
        if parts and seconds > 0:
            slowest = max(parts, key=self._expected)
            self._note(slowest.place, slowest.tokens / seconds)

    def computed(self, tokens: int, seconds: float) -> None:
        """A step has computed so many tokens of prompts."""
        if tokens > 0 and seconds > 0:
            self._note(COMPUTED, tokens / seconds)

    def load_seconds(self, place: str, tokens: int) -> float:
        """What so many tokens of a place should take; 0 if that is not known."""
        rate, when = self._rates.get(place, (0.0, 0.0))
        if not rate or self._clock() - when > LATELY_SECONDS:
            return 0.0
        return tokens / rate

    def compute_seconds(self, tokens: int) -> float:
        """What so many tokens should take to compute; a second each as long as that is not known."""
        known = self._rates.get(COMPUTED)
        return tokens / known[0] if known else float(tokens)

    def _expected(self, part: Part) -> tuple[bool, float, int]:
        seconds = self.load_seconds(part.place, part.tokens)
        return not seconds, seconds, part.tokens

    def _note(self, what: str, rate: float) -> None:
        before, when = self._rates.get(what, (0.0, 0.0))
        now = self._clock()
        if before and now - when <= LATELY_SECONDS:
            rate = 1 / (NEWEST / rate + (1 - NEWEST) / before)
        self._rates[what] = rate, now
