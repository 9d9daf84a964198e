"""The results of querying a peer and four tiers for a long prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.tools.measuring.rounds import percentile

TARGET_SECONDS = 1e-3

SHARES = ("finding chunks", "coverage and bids", "two together", "choosing and telling")
"""Names of the parts of a query's time."""


@dataclass(frozen=True, slots=True)
class CallTimes:
    """The times of many calls.

    Attributes:
        median, p99: median and 99th percentile over all calls, in seconds.
    """

    median: float
    p99: float

    @staticmethod
    def of(values: Sequence[float]) -> CallTimes:
        """Return the median and the 99th percentile of the times of at least one call, in seconds."""
        return CallTimes(percentile(values, 50), percentile(values, 99))


@dataclass(frozen=True, slots=True, kw_only=True)
class AskTimes:
    """The times for one kind of request.

    Attributes:
        layers: kinds of the model's layers.
        policy: policy for choosing a source.
        place: distribution of the prompt's chunks over the sources.
        arriving: time to digest the chunks' keys and the tokens of the peer's offer, when a request arrives.
        first: time for which the step with the first query waits.
        again: time for which a step with a later query waits.
        shares: median time of each part of the first query in seconds, by `SHARES`.
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
        tokens: length of a prompt, in tokens.
        chunks: number of chunks of a prompt in every KV cache group.
        known: number of chunks in the index of each tier, host memory first.
        rounds: number of requests of each kind.
        asks: times, one entry per kind.
    """

    tokens: int
    chunks: int
    known: tuple[int, ...]
    rounds: int
    asks: tuple[AskTimes, ...]

    @property
    def reached(self) -> bool:
        """Return whether the medians of all kinds are below the target."""
        return all(max(one.first.median, one.again.median) < TARGET_SECONDS for one in self.asks)

    @property
    def longest(self) -> AskTimes:
        """Return the times of the kind whose first query takes longest, by the median."""
        return max(self.asks, key=lambda one: one.first.median)
