"""How long places take to give tokens, and the engine to compute them, as measured here lately.

What a load costs besides its tokens (steps of the engine, round trips) is most of a small one: 64 tokens may
take as long as 600. So a place is a line, seconds by tokens, through its measurements, and a small load says
little of a large one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.connector.bids import Part

NEWEST = 0.3
"""What the newest measurement counts; those before it share the rest."""

LATELY_SECONDS = 120.0
"""A place that was not measured for so long is tried anew: it may be faster by now."""

_ALIKE = 0.1
"""Sizes that deviate less from their mean, as a share of it, say nothing of a slope."""


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds by tokens: least squares through measurements, of which the newest count most.

    >>> Line.through(100, 2.0).then(600, 3.0).seconds(350)
    2.5

    Where all were of about one size, what is certain is as good as it may be: a larger load takes as long, a
    smaller one as much less as it is smaller. What is wrong with that the next measurement tells.

    Attributes:
        tokens, seconds_mean, squares, products: means of tokens, seconds, tokens² and tokens times seconds.
    """

    tokens: float
    seconds_mean: float
    squares: float
    products: float

    @staticmethod
    def through(tokens: int, seconds: float) -> Line:
        """Return the line through one measurement, of at least one token."""
        return Line(tokens, seconds, tokens * tokens, tokens * seconds)

    def then(self, tokens: int, seconds: float) -> Line:
        """Return the line with one more measurement."""
        new = Line.through(tokens, seconds)
        return Line(
            *(NEWEST * n + (1 - NEWEST) * b for n, b in zip(_moments(new), _moments(self), strict=True))
        )

    def seconds(self, tokens: int) -> float:
        """Return the expected seconds for so many tokens: never less for more tokens, nor more per token."""
        most = self.seconds_mean / self.tokens
        spread = self.squares - self.tokens**2
        if spread <= (_ALIKE * self.tokens) ** 2:
            return most * min(tokens, self.tokens)
        slope = (self.products - self.tokens * self.seconds_mean) / spread
        return self.seconds_mean + min(max(slope, 0.0), most) * (tokens - self.tokens)


def _moments(line: Line) -> tuple[float, float, float, float]:
    return line.tokens, line.seconds_mean, line.squares, line.products


class Speeds:
    """Seconds by tokens, by place. What is not known costs nothing: it is tried, and then it is known."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lines: dict[str, tuple[Line, float]] = {}
        self._rate = 0.0

    def loaded(self, parts: Sequence[Part], seconds: float) -> None:
        """Record a load's seconds, for the place that was expected to take longest or is unknown."""
        if not parts or seconds <= 0:
            return
        slowest, now = max(parts, key=self._expected), self._clock()
        before = self._lately(slowest.place)
        line = before.then(slowest.tokens, seconds) if before else Line.through(slowest.tokens, seconds)
        self._lines[slowest.place] = line, now

    def computed(self, tokens: int, seconds: float) -> None:
        """Record the seconds of a step that computed so many tokens of prompts."""
        if tokens > 0 and seconds > 0:
            newest = tokens / seconds
            self._rate = 1 / (NEWEST / newest + (1 - NEWEST) / self._rate) if self._rate else newest

    def load_seconds(self, place: str, tokens: int) -> float:
        """Return the expected seconds for so many tokens of a place; 0 if unknown."""
        line = self._lately(place)
        return line.seconds(tokens) if line else 0.0

    def compute_seconds(self, tokens: int) -> float:
        """Return the expected seconds to compute so many tokens; one each while unknown."""
        return tokens / self._rate if self._rate else float(tokens)

    def _lately(self, place: str) -> Line | None:
        line, when = self._lines.get(place, (None, 0.0))
        return line if self._clock() - when <= LATELY_SECONDS else None

    def _expected(self, part: Part) -> tuple[bool, float, int]:
        seconds = self.load_seconds(part.place, part.tokens)
        return not seconds, seconds, part.tokens
