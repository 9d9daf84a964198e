"""Bids: what sources offer to load, and the measured speeds that tell how long a load takes.

A *place* is where tokens come from: ``peer``, or a tier. Each load has a fixed cost (engine steps, round
trips), which dominates a small load: 64 tokens may take as long as 600. So the time of a place is modelled as
a straight line, seconds by tokens, fitted to its measurements.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

NEWEST = 0.3
"""Weight of the newest measurement. All earlier ones share the rest."""

LATELY_SECONDS = 120.0
"""Seconds after which the measurements of a place expire. Its speed is then unknown, so it is tried again."""

_ALIKE = 0.1
"""If the relative standard deviation of the measured sizes is at most this, the slope is unknown."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class PlaceTokens:
    """The number of tokens that a source offers to load from one place: ``peer``, or a tier."""

    place: str
    tokens: int


def trim_parts(parts: Iterable[PlaceTokens], tokens: int) -> tuple[PlaceTokens, ...]:
    """Return the places of the first `tokens` tokens of an offer, at most the sum of its parts.

    >>> trim_parts((PlaceTokens("host", 300), PlaceTokens("file", 200), PlaceTokens("object", 100)), 400)
    (PlaceTokens(place='host', tokens=300), PlaceTokens(place='file', tokens=100))
    """
    found = []
    for part in parts:
        taken = min(part.tokens, tokens)
        if taken > 0:
            found.append(PlaceTokens(part.place, taken))
        tokens -= taken
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Bid:
    """A source's offer to load KV of tokens that the engine does not have.

    Attributes:
        head, tail: bids for the start and the rest of the prefix, if two sources load one prefix together:
            another source and `source`. None if `source` loads everything.
    """

    source: str  # a peer's name, or ``tiers``
    parts: tuple[PlaceTokens, ...]  # number of offered tokens from each place, including the tokens of `head`
    # True while the source is still looking up how much KV it has. The numbers in `parts` are then upper
    # bounds.
    looking: bool = False
    # True if the source is still looking, but the request came with a peer's ticket, which says the numbers
    # in `parts`.
    promised: bool = False
    # Maximum seconds until the source, which is still looking, answers; 0 if there is no such limit.
    within_seconds: float = 0.0
    head: Bid | None = None
    tail: Bid | None = None
    # True if the place still computes some of the tokens. The time of the load then tells nothing about the
    # speed of the place.
    growing: bool = False

    @classmethod
    def composed(cls, head: Bid, tail: Bid) -> Bid:
        looking = [bid for bid in (head, tail) if bid.looking]
        return cls(
            tail.source,
            head.parts + tail.parts,
            looking=bool(looking),
            promised=bool(looking) and all(bid.promised for bid in looking),
            within_seconds=max((bid.within_seconds for bid in looking), default=0.0)
            if all(bid.within_seconds for bid in looking)
            else 0.0,
            head=head,
            tail=tail,
        )

    @property
    def tokens(self) -> int:
        tokens = 0
        for part in self.parts:
            tokens += part.tokens
        return tokens

    @property
    def places(self) -> frozenset[str]:
        return frozenset(part.place for part in self.parts)

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources, that of the prompt's start first."""
        return (self.source,) if self.head is None else (*self.head.sources, self.source)

    @property
    def unanswered(self) -> frozenset[str]:
        """Names of the answers that this bid waits for."""
        if self.head is not None and self.tail is not None:
            return self.head.unanswered | self.tail.unanswered
        if not self.looking:
            return frozenset()
        # A peer that still computes the prompt answers much later, so its answers are timed apart.
        return frozenset((f"{self.source}, computing" if self.growing else self.source,))

    def has_same_sources(self, other: Bid | None) -> bool:
        return other is not None and (self.sources, self.places) == (other.sources, other.places)


@dataclass(slots=True)
class _Line:
    """Linear model of the seconds that a load takes for a number of tokens, fitted by least squares.

    >>> line = _Line.of(100, 2.0)
    >>> line.add(600, 3.0)
    >>> line.seconds(350)  # midway between two measurements
    2.5

    Newer measurements have more weight. If all measured loads have similar sizes, the slope is unknown. The
    model then returns the lowest plausible time: the mean time for a larger load, and a time in proportion to
    the tokens for a smaller one. Later measurements of other sizes correct this.

    Attributes:
        tokens, seconds_mean, squares, products: weighted means of tokens, seconds, tokens², and tokens
            times seconds.
    """

    tokens: float
    seconds_mean: float
    squares: float
    products: float

    @staticmethod
    def of(tokens: int, seconds: float) -> _Line:
        return _Line(tokens, seconds, tokens * tokens, tokens * seconds)

    def add(self, tokens: int, seconds: float) -> None:
        old = 1 - NEWEST
        self.tokens = NEWEST * tokens + old * self.tokens
        self.seconds_mean = NEWEST * seconds + old * self.seconds_mean
        self.squares = NEWEST * (tokens * tokens) + old * self.squares
        self.products = NEWEST * (tokens * seconds) + old * self.products

    def seconds(self, tokens: int) -> float:
        # As the number of tokens grows, the result never falls, and the time per token never rises.
        most = self.seconds_mean / self.tokens
        spread = self.squares - self.tokens**2
        if spread <= (_ALIKE * self.tokens) ** 2:
            return most * min(tokens, self.tokens)
        slope = (self.products - self.tokens * self.seconds_mean) / spread
        return self.seconds_mean + min(max(slope, 0.0), most) * (tokens - self.tokens)


class Speeds:
    """The measured speeds of loading, computing and answering.

    What was not measured lately is expected to take 0 seconds, so that it is tried: a load from a place, or
    the answer of a source. The speed of computing never expires.

    >>> speeds = Speeds(clock=lambda: 0.0)
    >>> speeds.record_answer("peer", 2.0)
    >>> speeds.record_unanswered("peer", 1.0)  # less than expected, so it says nothing
    >>> speeds.record_unanswered("peer", 12.0)
    >>> speeds.answer_seconds("peer")  # 0.3 * 12 + 0.7 * 2
    5.0
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Both with the time of the newest measurement.
        self._lines: dict[str, tuple[_Line, float]] = {}
        self._answers: dict[str, tuple[float, float]] = {}
        self._rate = 0.0

    def record_load(self, parts: Sequence[PlaceTokens], seconds: float) -> None:
        """Record the seconds from the start of a load to its end, for the slowest of its places."""
        # A load reads from its places in parallel. The slowest is one of unknown speed if there is one, else
        # the one with the longest expected time.
        if not parts or seconds <= 0:
            return
        slowest, most = parts[0], (False, -1.0, 0)
        for part in parts:
            expected = self.load_seconds(part.place, part.tokens)
            if (rank := (not expected, expected, part.tokens)) > most:
                slowest, most = part, rank
        line = self._recent(self._lines, slowest.place)
        if line is None:
            line = _Line.of(slowest.tokens, seconds)
        else:
            line.add(slowest.tokens, seconds)
        self._lines[slowest.place] = line, self._clock()

    def load_seconds(self, place: str, tokens: int) -> float:
        """Return the expected seconds to load tokens from a place; 0 if its speed is unknown."""
        line = self._recent(self._lines, place)
        return line.seconds(tokens) if line else 0.0

    def record_computation(self, tokens: int, seconds: float) -> None:
        if tokens > 0 and seconds > 0:
            newest = tokens / seconds
            self._rate = 1 / (NEWEST / newest + (1 - NEWEST) / self._rate) if self._rate else newest

    @property
    def computing_is_known(self) -> bool:
        return self._rate > 0

    def compute_seconds(self, tokens: int) -> float:
        """Return the expected seconds to compute tokens; one second per token if the speed is unknown."""
        return tokens / self._rate if self._rate else float(tokens)

    def record_answer(self, name: str, seconds: float) -> None:
        """Record that a source answered so many seconds after it was first asked, with KV or without."""
        before, now = self._recent(self._answers, name), self._clock()
        mean = seconds if before is None else NEWEST * seconds + (1 - NEWEST) * before
        # The oldest record is first, so that names that are not used any more do not pile up.
        self._answers.pop(name, None)
        self._answers[name] = mean, now
        oldest = next(iter(self._answers))
        if now - self._answers[oldest][1] > LATELY_SECONDS:
            del self._answers[oldest]

    def record_unanswered(self, name: str, seconds: float) -> None:
        """Record that a source had not answered so many seconds after it was first asked.

        This only raises the expected time. A wait that was shorter than expected says nothing.
        """
        if seconds > self.answer_seconds(name):
            self.record_answer(name, seconds)

    def answer_seconds(self, name: str) -> float:
        return self._recent(self._answers, name) or 0.0

    def _recent(self, measured: Mapping[str, tuple[_T, float]], name: str) -> _T | None:
        """Return what was measured; None if it was never measured, or has expired."""
        found = measured.get(name)
        return None if found is None or self._clock() - found[1] > LATELY_SECONDS else found[0]


_PREFILL_TOKENS = 128
"""Minimum number of tokens of a step to be measured. Smaller steps say little about prompt computation."""

_PAUSE_SECONDS = 0.005
"""Seconds without a step after which the engine counts as idle. While requests run, steps follow at once."""


class StepTimes:
    """Times of the engine's steps. They show how fast it computes prompts, and whether it is idle.

    Attributes:
        small_seconds: time of the last step that computed less than `_PREFILL_TOKENS` tokens; 0 before it.
    """

    def __init__(self, speeds: Speeds, clock: Callable[[], float] = time.monotonic) -> None:
        self._speeds, self._clock = speeds, clock
        self._under_way: deque[tuple[float, int]] = deque()
        self._done, self._last_tokens = 0.0, 0
        self._computing = 0
        self.small_seconds = 0.0

    @property
    def computing(self) -> bool:
        return self._computing > 0

    @property
    def idle(self) -> bool:
        """Whether the engine computes no request: its last step computed none, or was done some time ago."""
        if self._computing:
            return False
        return not self._last_tokens or self._clock() - self._done > _PAUSE_SECONDS

    def scheduled(self, tokens: int) -> float:
        """Record that the engine schedules a step now. Return the time, in seconds."""
        now = self._clock()
        self._under_way.append((now, tokens))
        self._last_tokens = tokens
        self._computing += tokens > 0
        return now

    def done(self) -> None:
        """Record that the engine has taken the output of the oldest step under way."""
        if not self._under_way:
            return
        (scheduled, tokens), now = self._under_way.popleft(), self._clock()
        self._computing -= tokens > 0
        # With asynchronous scheduling or pipeline parallelism, a step is scheduled while others are under
        # way. It counts as begun when the step before it is done.
        if tokens >= _PREFILL_TOKENS:
            self._speeds.record_computation(tokens, now - max(scheduled, self._done))
        elif tokens:
            # Not `max`, which doubles the time of this function: most steps are small.
            self.small_seconds = now - self._done if scheduled < self._done else now - scheduled
        self._done = now
