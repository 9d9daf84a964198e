"""Cases of the tier benchmark. Each compares kvferry with movers that move the same bytes without kvferry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.bench.movers import Mover
from kvferry.bench.rounds import MoverRounds, run_rounds
from kvferry.measuring.spread import Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCase:
    """The movers for one tier, direction and depth.

    Attributes:
        tier: name of the tier.
        direction: "store" or "load".
        depth: number of chunks in flight, or of threads for the host tier.
        target: share of the limit's speed that kvferry should reach.
        ours: mover that uses kvferry.
        limits: movers without kvferry. The fastest one is the limit.
        controls: movers that help to explain the result but are not limits.
    """

    tier: str
    direction: str
    depth: int
    target: float
    ours: Mover
    limits: tuple[Mover, ...]
    controls: tuple[Mover, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpeed:
    """The measured rounds of one `TierCase`.

    Attributes:
        tier, direction, depth, target: same as in the measured `TierCase`.
        ours: rounds of kvferry.
        limits, controls: rounds of the case's other movers.
    """

    tier: str
    direction: str
    depth: int
    target: float
    ours: MoverRounds
    limits: tuple[MoverRounds, ...]
    controls: tuple[MoverRounds, ...] = ()

    @property
    def limit(self) -> MoverRounds:
        """Return the limit: the rounds of the mover in `limits` with the highest median speed."""
        return max(self.limits, key=lambda series: series.gigabytes_per_second.median)

    @property
    def ratio(self) -> Spread:
        """Return kvferry's speed as a multiple of the limit's speed in the same round."""
        return self.ours.times(self.limit)

    @property
    def reached(self) -> bool:
        """Return whether the median of `ratio` reaches the target."""
        return self.ratio.median >= self.target


def measure_cases(
    cases: Sequence[TierCase], repeats: int, progress: Callable[[str], None]
) -> tuple[TierSpeed, ...]:
    """Run all movers of all cases in every round, and return the measured rounds of each case.

    Args:
        cases: cases to measure.
        repeats: number of counted rounds. One warm-up round before them is not counted.
        progress: function that is called with a line of text before each round.

    Raises:
        TransferError: a mover failed.
    """
    movers = [mover for one in cases for mover in (one.ours, *one.limits, *one.controls)]
    seconds = run_rounds([mover.move for mover in movers], repeats, progress)
    series = iter([MoverRounds(m.name, m.bytes, tuple(s)) for m, s in zip(movers, seconds, strict=True)])
    return tuple(
        TierSpeed(
            tier=one.tier,
            direction=one.direction,
            depth=one.depth,
            target=one.target,
            ours=next(series),
            limits=tuple(next(series) for _ in one.limits),
            controls=tuple(next(series) for _ in one.controls),
        )
        for one in cases
    )
