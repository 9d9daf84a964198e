"""Ours against the limit: movers of the same bytes, run together, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.bench.movers import Mover
from kvferry.bench.rounds import Series, run_rounds
from kvferry.measuring.spread import Spread


@dataclass(frozen=True, slots=True)
class Contest:
    """Movers of the same bytes.

    Attributes:
        tier: where chunks go, or come from.
        way: "store" or "load".
        depth: chunks under way at a time.
        target: share of the limit that is to be reached.
        ours: kvferry's.
        limits: what it is measured by.
        asides: what explains the result, and is no limit.
    """

    tier: str
    way: str
    depth: int
    target: float
    ours: Mover
    limits: tuple[Mover, ...]
    asides: tuple[Mover, ...] = ()


@dataclass(frozen=True, slots=True)
class Speed:
    """A contest, measured.

    Attributes:
        tier, way, depth, target: as of `Contest`.
        ours: kvferry's rounds.
        limits, asides: the others'.
    """

    tier: str
    way: str
    depth: int
    target: float
    ours: Series
    limits: tuple[Series, ...]
    asides: tuple[Series, ...] = ()

    @property
    def limit(self) -> Series:
        """The fastest of the limits, by the median."""
        return max(self.limits, key=lambda series: series.gigabytes_per_second.median)

    @property
    def ratio(self) -> Spread:
        """Speed as a share of the limit's in the same round."""
        return self.ours.times(self.limit)

    @property
    def reached(self) -> bool:
        """The target is met, by the median."""
        return self.ratio.median >= self.target


def run(contests: Sequence[Contest], repeats: int, progress: Callable[[str], None]) -> tuple[Speed, ...]:
    """Run all movers of all contests in every round.

    Raises:
        TransferError: a mover failed.
    """
    movers = [mover for one in contests for mover in (one.ours, *one.limits, *one.asides)]
    seconds = run_rounds(movers, repeats, progress)
    series = iter([Series(m.name, m.bytes, tuple(s)) for m, s in zip(movers, seconds, strict=True)])
    return tuple(
        Speed(
            one.tier,
            one.way,
            one.depth,
            one.target,
            next(series),
            tuple(next(series) for _ in one.limits),
            tuple(next(series) for _ in one.asides),
        )
        for one in contests
    )
