"""The results of asking five sources for a long prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.measuring.spread import percentile

TARGET_SECONDS = 1e-3

SHARES = ("finding chunks", "coverage and bids", "two together", "choosing and telling")
"""Of the time of an asking."""


@dataclass(frozen=True, slots=True)
class CallTimes:
    """Seconds of many calls.

    Attributes:
        median, p99: over all calls.
    """

    median: float
    p99: float

    @staticmethod
    def of(values: Sequence[float]) -> CallTimes:
        """Return the times of at least one call."""
        return CallTimes(percentile(values, 50), percentile(values, 99))


@dataclass(frozen=True, slots=True, kw_only=True)
class AskTimes:
    """The times for one kind of request.

    Attributes:
        layers, policy, place: kinds of layers of the model, policy of the engine, and who has the prompt.
        arriving: time to digest the keys, and the tokens of the peer's offer, as a request arrives.
        first: time that the step waits which asks first.
        again: time that a later step waits.
        shares: median seconds of `first`, by `SHARES`.
    """

    layers: str
    policy: str
    place: str
    arriving: CallTimes
    first: CallTimes
    again: CallTimes
    shares: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskResults:
    """The times for all kinds of requests.

    Attributes:
        tokens, chunks: length of a prompt, and its chunks in every group.
        known: number of chunks that each tier knows, host memory first.
        rounds: requests of each kind.
        asks: times by kind.
    """

    tokens: int
    chunks: int
    known: tuple[int, ...]
    rounds: int
    asks: tuple[AskTimes, ...]

    @property
    def reached(self) -> bool:
        """Whether no kind's median exceeds the target."""
        return all(max(one.first.median, one.again.median) < TARGET_SECONDS for one in self.asks)

    @property
    def longest(self) -> AskTimes:
        """The kind whose first asking takes longest, by the median."""
        return max(self.asks, key=lambda one: one.first.median)
