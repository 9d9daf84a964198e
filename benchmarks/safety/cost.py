"""The cost of a protection: seconds with it and without it, round by round."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.geometry.models import ModelReading
from kvferry.measuring.spread import Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetyJob:
    """The protections to measure.

    Attributes:
        parts: names from `safety.measure.PARTS`.
        reading: model whose KV cache is moved.
        tokens: length of the request.
        repeats: rounds; each does the work once with a protection and once without.
    """

    parts: tuple[str, ...]
    reading: ModelReading
    tokens: int
    repeats: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtectionCost:
    """The rounds of one piece of work, with a protection and without.

    Attributes:
        part: name of the protection.
        work: the work that is done with and without it.
        on, off: seconds of every round, with and without.
        whole: seconds of the transfer or load that the work belongs to, per round; empty if the work is all
        of it. target: largest allowed share of the whole, or None.
    """

    part: str
    work: str
    on: tuple[float, ...]
    off: tuple[float, ...]
    whole: tuple[float, ...] = ()
    target: float | None = None

    @property
    def extra(self) -> Spread:
        """Seconds that the protection adds.

        >>> ProtectionCost(part="curve", work="talk", on=(3.0, 5.0), off=(2.0, 2.0)).extra
        Spread(median=2.0, low=1.0, high=3.0)
        """
        return Spread.of([on - off for on, off in zip(self.on, self.off, strict=True)])

    @property
    def share(self) -> Spread:
        """Seconds that the protection adds, as a share of the whole, or of the work without it.

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
        """Whether the median share keeps the target; True without a target."""
        return self.target is None or self.share.median <= self.target
