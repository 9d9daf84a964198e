"""How long a scheduler's thread asks five sources of a long prompt: what `ask_rounds` measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.measuring.spread import percentile

TARGET_SECONDS = 1e-3

SHARES = ("finding chunks", "coverage and bids", "two together", "choosing and telling")
"""Of the time of an asking."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of many calls.

    Attributes:
        median, p99: of all.
    """

    median: float
    p99: float

    @staticmethod
    def of(values: Sequence[float]) -> Times:
        """Of at least one value."""
        return Times(percentile(values, 50), percentile(values, 99))


@dataclass(frozen=True, slots=True)
class Asks:
    """Askings of one kind.

    Attributes:
        layers, policy, place: of the model; of the engine; who has the prompts.
        arriving: as a request comes in: its keys are digested, and the tokens of the peer's offer.
        first: seconds that the step waits which asks for it.
        again: that a later one does.
        shares: of `SHARES`, of the first, by the median.
    """

    layers: str
    policy: str
    place: str
    arriving: Times
    first: Times
    again: Times
    shares: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Asking:
    """What asking for a prompt takes.

    Attributes:
        tokens, chunks: of a prompt; chunks of every group.
        known: chunks that each tier knows, host memory first.
        rounds: requests of each kind.
        asks: by kind.
    """

    tokens: int
    chunks: int
    known: tuple[int, ...]
    rounds: int
    asks: tuple[Asks, ...]

    @property
    def reached(self) -> bool:
        """No step waits longer than the target, by the median."""
        return all(max(one.first.median, one.again.median) < TARGET_SECONDS for one in self.asks)

    @property
    def longest(self) -> Asks:
        """Whose first asking takes longest, by the median."""
        return max(self.asks, key=lambda one: one.first.median)
