"""What is measured of a protection."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.geometry.models import ModelReading
from kvferry.measuring.spread import Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetyJob:
    """What is measured.

    Attributes:
        parts: of `safety.PARTS`.
        reading: what the model keeps.
        tokens: of a request that is moved.
        repeats: rounds; each does the work once with a protection and once without.
    """

    parts: tuple[str, ...]
    reading: ModelReading
    tokens: int
    repeats: int


@dataclass(frozen=True, slots=True)
class Cost:
    """What a protection costs at one piece of work, round by round.

    Attributes:
        part: the protection.
        work: what is done with and without it.
        on, off: seconds of every round, with and without.
        whole: seconds of what the work is a part of, of every round; empty if it is all.
        target: largest share of the whole; None if there is no target for this.
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

        >>> Cost("curve", "talk", (3.0, 5.0), (2.0, 2.0)).extra
        Spread(median=2.0, low=1.0, high=3.0)
        """
        return Spread.of([on - off for on, off in zip(self.on, self.off, strict=True)])

    @property
    def share(self) -> Spread:
        """Seconds that the protection adds, as a share of the whole, or of the work without it.

        >>> Cost("curve", "talk", (3.0, 5.0), (2.0, 2.0), (10.0, 10.0)).share.median
        0.2
        """
        whole = self.whole or self.off
        each = zip(self.on, self.off, whole, strict=True)
        return Spread.of([(on - off) / one for on, off, one in each])

    @property
    def reached(self) -> bool:
        """Whether the target is kept; so it is where there is none."""
        return self.target is None or self.share.median <= self.target
