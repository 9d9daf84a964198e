"""Measured speeds of loading tokens from each place, and of computing them.

A *place* is where tokens come from: ``peer``, or a tier. Each load has a fixed cost (engine steps, round
trips), which dominates a small load: 64 tokens may take as long as 600. So the time of a place is modelled as
a straight line, seconds by tokens, fitted to its measurements.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvferry.connector.load import PlaceTokens

NEWEST = 0.3
"""Weight of the newest measurement. All earlier ones share the rest."""

LATELY_SECONDS = 120.0
"""Seconds after which the measurements of a place expire. Its speed is then unknown, so it is tried again."""

_ALIKE = 0.1
"""If the relative standard deviation of the measured sizes is at most this, the slope is unknown."""


@dataclass(frozen=True, slots=True)
class Line:
    """Linear model of the seconds that a load takes for a number of tokens, fitted by least squares.

    >>> Line.from_sample(100, 2.0).updated(600, 3.0).seconds(350)  # midway between two measurements
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
    def from_sample(tokens: int, seconds: float) -> Line:
        """Create the line from a single measurement, of at least one token. Its slope is unknown."""
        return Line(tokens, seconds, tokens * tokens, tokens * seconds)

    def updated(self, tokens: int, seconds: float) -> Line:
        """Return this line updated with a new measurement, of at least one token."""
        new = Line.from_sample(tokens, seconds)
        return Line(
            *(NEWEST * n + (1 - NEWEST) * b for n, b in zip(_moments(new), _moments(self), strict=True))
        )

    def seconds(self, tokens: int) -> float:
        """Return the expected seconds to load `tokens` tokens.

        As the number of tokens grows, the result never falls, and the time per token never rises.
        """
        most = self.seconds_mean / self.tokens
        spread = self.squares - self.tokens**2
        if spread <= (_ALIKE * self.tokens) ** 2:
            return most * min(tokens, self.tokens)
        slope = (self.products - self.tokens * self.seconds_mean) / spread
        return self.seconds_mean + min(max(slope, 0.0), most) * (tokens - self.tokens)


def _moments(line: Line) -> tuple[float, float, float, float]:
    return line.tokens, line.seconds_mean, line.squares, line.products


class Speeds:
    """The measured speeds of loading from each place (``peer`` or a tier), and of computing.

    A place of unknown speed is expected to take 0 seconds, so that it is tried.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lines: dict[str, tuple[Line, float]] = {}
        self._rate = 0.0

    def record_load(self, parts: Sequence[PlaceTokens], seconds: float) -> None:
        """Record the seconds from the start of a load to its end.

        A load reads from its places in parallel, so its time is the time of the slowest place. The time is
        recorded for one place only: one of unknown speed if there is one, else the one with the longest
        expected time.
        """
        if not parts or seconds <= 0:
            return
        slowest, now = max(parts, key=self._expected), self._clock()
        before = self._recent_line(slowest.place)
        line = (
            before.updated(slowest.tokens, seconds) if before else Line.from_sample(slowest.tokens, seconds)
        )
        self._lines[slowest.place] = line, now

    def record_computation(self, tokens: int, seconds: float) -> None:
        """Record the seconds of a step that computed `tokens` tokens."""
        if tokens > 0 and seconds > 0:
            newest = tokens / seconds
            self._rate = 1 / (NEWEST / newest + (1 - NEWEST) / self._rate) if self._rate else newest

    @property
    def computing_is_known(self) -> bool:
        """Whether the speed of computing has been measured."""
        return self._rate > 0

    def load_seconds(self, place: str, tokens: int) -> float:
        """Return the expected seconds to load tokens from a place; 0 if its speed is unknown."""
        line = self._recent_line(place)
        return line.seconds(tokens) if line else 0.0

    def compute_seconds(self, tokens: int) -> float:
        """Return the expected seconds to compute tokens; one second per token if the speed is unknown."""
        return tokens / self._rate if self._rate else float(tokens)

    def _recent_line(self, place: str) -> Line | None:
        line, when = self._lines.get(place, (None, 0.0))
        return line if self._clock() - when <= LATELY_SECONDS else None

    def _expected(self, part: PlaceTokens) -> tuple[bool, float, int]:
        seconds = self.load_seconds(part.place, part.tokens)
        return not seconds, seconds, part.tokens


_PREFILL_TOKENS = 128
"""Minimum number of tokens of a step to be measured. Smaller steps say little about prompt computation."""

_PAUSE_SECONDS = 0.005
"""Seconds without a step after which the engine counts as idle. While requests run, steps follow at once."""


class StepTimes:
    """Times of the engine's steps. They show how fast it computes prompts, and whether it is idle.

    The engine reports when each step is scheduled and when its output is taken, in the order of steps.
    """

    def __init__(self, speeds: Speeds, clock: Callable[[], float] = time.monotonic) -> None:
        self._speeds, self._clock = speeds, clock
        self._under_way: deque[tuple[float, int]] = deque()
        self._done, self._last_tokens = 0.0, 0
        self._computing = 0

    @property
    def computing(self) -> bool:
        """Whether a step that computes tokens has been scheduled and is not done."""
        return self._computing > 0

    @property
    def idle(self) -> bool:
        """Whether the engine computes no request: its last step computed none, or was done some time ago."""
        if self.computing:
            return False
        return not self._last_tokens or self._clock() - self._done > _PAUSE_SECONDS

    def scheduled(self, tokens: int) -> float:
        """Record that the engine schedules a step of `tokens` tokens now. Return the time, in seconds."""
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
        if tokens >= _PREFILL_TOKENS:
            # With asynchronous scheduling or pipeline parallelism, a step is scheduled while others are under
            # way. It counts as begun when the step before it is done.
            self._speeds.record_computation(tokens, now - max(scheduled, self._done))
        self._done = now


class AnswerTimes:
    """The measured seconds from the first question to a source until its answer, by name of the answer.

    An answer whose time is unknown is expected at once, so that it is waited for and measured.

    >>> times = AnswerTimes(clock=lambda: 0.0)
    >>> times.record("peer", 2.0)
    >>> times.record_unanswered("peer", 1.0)  # less than expected, so it says nothing
    >>> times.record_unanswered("peer", 12.0)
    >>> times.seconds("peer")  # 0.3 * 12 + 0.7 * 2
    5.0
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._means: dict[str, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._means)

    def record(self, name: str, seconds: float) -> None:
        """Record that a source answered so many seconds after it was first asked, with KV or without."""
        before, now = self._recent(name), self._clock()
        mean = seconds if before is None else NEWEST * seconds + (1 - NEWEST) * before
        # The oldest record is first, so that names that are not used any more do not pile up.
        self._means.pop(name, None)
        self._means[name] = mean, now
        oldest = next(iter(self._means))
        if now - self._means[oldest][1] > LATELY_SECONDS:
            del self._means[oldest]

    def record_unanswered(self, name: str, seconds: float) -> None:
        """Record that a source had not answered so many seconds after it was first asked.

        This only raises the expected time. A wait that was shorter than expected says nothing.
        """
        if seconds > self.seconds(name):
            self.record(name, seconds)

    def seconds(self, name: str) -> float:
        """Return the expected seconds until an answer; 0 if no time was measured lately."""
        return self._recent(name) or 0.0

    def _recent(self, name: str) -> float | None:
        mean, when = self._means.get(name, (None, 0.0))
        return mean if self._clock() - when <= LATELY_SECONDS else None


@dataclass(slots=True)
class AwaitedAnswers:
    """The answers that one request has asked for and not received, with the time of the first question.

    One admission of a request may ask its sources twice. So the answers that are missing are collected with
    `note`, and `settle` compares them with those that were missing at the admission before.
    """

    _since: dict[str, float] = field(default_factory=dict)
    _missing: set[str] = field(default_factory=set)

    def note(self, names: Iterable[str]) -> None:
        """Note that these answers are missing at the current admission."""
        self._missing.update(names)

    def settle(self, times: AnswerTimes, now: float) -> None:
        """Record in `times` the answers that are not missing any more.

        Call this at the end of an admission.
        """
        for name in self._since.keys() - self._missing:
            times.record(name, now - self._since.pop(name))
        for name in self._missing:
            self._since.setdefault(name, now)
        self._missing.clear()

    def give_up(self, times: AnswerTimes, now: float) -> None:
        """Record in `times` that the request goes on without the answers that are still missing."""
        for name, since in self._since.items():
            times.record_unanswered(name, now - since)
        self._since.clear()


@dataclass(slots=True)
class Waiting:
    """A stopwatch for the time that one request waits for a source of KV or for free blocks.

    Other time in the engine's queue does not count. All times are monotonic seconds.

    Attributes:
        seconds: sum of all finished waits.
    """

    seconds: float = 0.0
    _since: float | None = None

    def until(self, now: float) -> float:
        """End the current wait, if any, at `now`; return the seconds of all waits."""
        if self._since is not None:
            self.seconds += now - self._since
            self._since = None
        return self.seconds

    def begin(self, now: float) -> None:
        """Begin a wait at `now`. The next call of `until` ends it."""
        self._since = now
