"""The cost of a protection: the times of the same work with and without it, round by round."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.tools.measuring.rounds import Spread
from kvferry.tools.models import ModelReading


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetyJob:
    """The protections and settings to measure.

    Attributes:
        parts: names of the protections, from `safety.measure.PARTS`.
        reading: description of the model's KV cache.
        tokens: length of the request, in tokens.
        repeats: number of rounds, each of which does the work with and without a protection.
        gigabits: rate in Gbit/s of a link between the two engines of verified transfers, over TCP, 0 for no
            limit; None if they are on one host.
    """

    parts: tuple[str, ...]
    reading: ModelReading
    tokens: int
    repeats: int
    gigabits: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtectionCost:
    """The measured times of some work with and without a protection.

    Attributes:
        part: name of the protection.
        work: description of the work that is timed.
        on, off: times of every round with and without the protection, in seconds.
        whole: times of the transfer or load that the work is a part of, one per round, in seconds; empty if
            the work is the whole transfer or load.
        target: largest allowed share of the whole; None for no target.
    """

    part: str
    work: str
    on: tuple[float, ...]
    off: tuple[float, ...]
    whole: tuple[float, ...] = ()
    target: float | None = None

    @property
    def extra(self) -> Spread:
        """Return the time that the protection adds, in seconds.

        >>> ProtectionCost(part="curve", work="talk", on=(3.0, 5.0), off=(2.0, 2.0)).extra
        Spread(median=2.0, low=1.0, high=3.0)
        """
        return Spread.of([on - off for on, off in zip(self.on, self.off, strict=True)])

    @property
    def share(self) -> Spread:
        """Return the added time as a share of `whole`; if that is empty, of the work without the protection.

        >>> cost = ProtectionCost(
        ...     part="curve", work="talk", on=(3.0, 5.0), off=(2.0, 2.0), whole=(10.0, 10.0)
        ... )
        >>> cost.share.median
        0.2
        """
        whole = self.whole or self.off
        each = zip(self.on, self.off, whole, strict=True)
        return Spread.of([(on - off) / one for on, off, one in each])

    @property
    def reached(self) -> bool:
        """Return whether the median share is at most the target; True without a target."""
        return self.target is None or self.share.median <= self.target
