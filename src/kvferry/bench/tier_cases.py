"""Cases of the tier benchmark. Each compares kvferry with movers that move the same bytes without kvferry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.bench.movers import Mover
from kvferry.bench.rounds import MoverRounds
from kvferry.measuring.rounds import run_rounds
from kvferry.measuring.spread import Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCase:
    """The movers (benchmarked methods of moving bytes) to compare for one tier, direction and depth.

    Attributes:
        tier: name of the tier.
        direction: "store" or "load".
        depth: number of chunks in flight, or of threads for the host tier.
        target: speed that kvferry should reach, as a share of the speed of the fastest mover in `limits`.
        ours: mover that uses kvferry.
        limits: movers without kvferry. kvferry is compared with the fastest of them.
        controls: other movers without kvferry. Their speeds help to explain the result.
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
    """The measured speeds of one `TierCase`: one tier, direction and depth.

    Attributes:
        tier: name of the tier.
        direction: "store" or "load".
        depth: number of chunks in flight, or of threads for the host tier.
        target: speed that kvferry should reach, as a share of the speed of the fastest method in `limits`.
        ours: times of kvferry in all rounds.
        limits: times of methods without kvferry. kvferry is compared with the fastest of them.
        controls: times of other methods without kvferry. They help to explain the result.
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
        """Return the entry of `limits` with the highest median speed. kvferry is compared with it."""
        return max(self.limits, key=lambda series: series.gigabytes_per_second.median)

    @property
    def ratio(self) -> Spread:
        """Return kvferry's speed as a multiple of the speed of the fastest method in `limits`.

        The speeds are compared round by round.
        """
        return self.ours.speed_ratio(self.limit)

    @property
    def reached(self) -> bool:
        """Return whether kvferry reaches its target speed: the median of `ratio` is at least `target`."""
        return self.ratio.median >= self.target


def measure_cases(
    cases: Sequence[TierCase], repeats: int, progress: Callable[[str], None]
) -> tuple[TierSpeed, ...]:
    """Run all movers (benchmarked methods of moving bytes) of all cases in every round, and return the times.

    Args:
        cases: cases to measure.
        repeats: number of counted rounds. One warm-up round before them is not counted.
        progress: function that is called with a line of text before each round.

    Raises:
        TransferError: a mover failed.

    Returns:
        The times of each case, in the order of `cases`.
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
