"""Times that requests wait for sources, and that sources take to answer: how long one may keep looking.

The record is kept beside the speeds (`speeds`), for the policy that compares times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvferry.connector.speeds import LATELY_SECONDS, NEWEST


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
        """Create an empty record.

        Args:
            clock: function that returns monotonic seconds.
        """
        self._clock = clock
        self._means: dict[str, tuple[float, float]] = {}

    def __len__(self) -> int:
        """Return the number of names with a measurement."""
        return len(self._means)

    def record(self, name: str, seconds: float) -> None:
        """Record that a source has answered `seconds` after it was first asked.

        Args:
            name: name of the answer (`Bid.unanswered`).
            seconds: seconds until the answer, whether the source had KV or not.
        """
        before, now = self._recent(name), self._clock()
        mean = seconds if before is None else NEWEST * seconds + (1 - NEWEST) * before
        # The oldest record is first, so that names that are not used any more do not pile up.
        self._means.pop(name, None)
        self._means[name] = mean, now
        oldest = next(iter(self._means))
        if now - self._means[oldest][1] > LATELY_SECONDS:
            del self._means[oldest]

    def record_unanswered(self, name: str, seconds: float) -> None:
        """Record that a source had not answered `seconds` after it was first asked, when the request went on.

        This only raises the expected time. A wait that was shorter than expected says nothing.

        Args:
            name: name of the answer (`Bid.unanswered`).
            seconds: seconds without an answer.
        """
        if seconds > self.seconds(name):
            self.record(name, seconds)

    def seconds(self, name: str) -> float:
        """Return the expected seconds until an answer; 0 if no time was measured lately.

        Args:
            name: name of the answer (`Bid.unanswered`).
        """
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
        """Note that these answers are missing at the current admission.

        Args:
            names: names of the answers (`Bid.unanswered`).
        """
        self._missing.update(names)

    def settle(self, times: AnswerTimes, now: float) -> None:
        """End the questions of an admission: record the times of the answers that are not missing any more.

        Args:
            times: record of answer times. This object is mutated.
            now: monotonic seconds.
        """
        for name in self._since.keys() - self._missing:
            times.record(name, now - self._since.pop(name))
        for name in self._missing:
            self._since.setdefault(name, now)
        self._missing.clear()

    def give_up(self, times: AnswerTimes, now: float) -> None:
        """Record that the request goes on without the answers that are still missing, and forget them.

        Args:
            times: record of answer times. This object is mutated.
            now: monotonic seconds.
        """
        for name, since in self._since.items():
            times.record_unanswered(name, now - since)
        self._since.clear()


@dataclass(slots=True)
class Waiting:
    """A stopwatch for the time that one request waits for a source of KV or for free blocks.

    A wait begins (`begin`) when the request cannot be admitted for one of these reasons, and ends (`until`)
    when the engine next tries to admit the request. Other time in the engine's queue does not count.

    Attributes:
        seconds: sum of all finished waits, in seconds.
    """

    seconds: float = 0.0
    _since: float | None = None

    def until(self, now: float) -> float:
        """End the current wait, if any, at `now` (monotonic seconds); return the total seconds of waiting."""
        if self._since is not None:
            self.seconds += now - self._since
            self._since = None
        return self.seconds

    def begin(self, now: float) -> None:
        """Begin a wait at `now` (monotonic seconds). The next call of `until` ends it."""
        self._since = now
