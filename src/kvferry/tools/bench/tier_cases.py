"""Cases of the tier benchmark. Each compares kvferry with movers that move the same bytes without kvferry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvferry.tools.bench.movers import Mover
from kvferry.tools.bench.rounds import MoverRounds
from kvferry.tools.measuring.rounds import Spread, run_rounds

MoverT_co = TypeVar("MoverT_co", covariant=True)


@dataclass(frozen=True, slots=True)
class _Compared(Generic[MoverT_co]):
    tier: str
    direction: str
    depth: int
    target: float
    ours: MoverT_co
    limits: tuple[MoverT_co, ...]
    controls: tuple[MoverT_co, ...] = ()


class TierCase(_Compared[Mover]):
    """The movers to compare for one tier, direction and depth.

    Attributes:
        direction: "store" or "load".
        depth: number of chunks in flight, or of threads for the host tier.
        target: speed that kvferry should reach, as a share of the speed of the fastest mover in `limits`.
        ours: mover that uses kvferry.
        limits: movers without kvferry. kvferry is compared with the fastest of them.
        controls: other movers without kvferry. Their speeds help to explain the result.
    """


class TierSpeed(_Compared[MoverRounds]):
    """The measured times of one `TierCase`, which has the same attributes."""

    @property
    def limit(self) -> MoverRounds:
        """Entry of `limits` with the highest median speed."""
        # By the median, because a single quick round may be luck.
        return max(self.limits, key=lambda series: series.gigabytes_per_second.median)

    @property
    def ratio(self) -> Spread:
        """Speed of kvferry as a multiple of that of `limit`, compared round by round."""
        return self.ours.speed_ratio(self.limit)

    @property
    def reached(self) -> bool:
        """True if the median of `ratio` is at least `target`."""
        return self.ratio.median >= self.target


def measure_cases(
    cases: Sequence[TierCase], repeats: int, progress: Callable[[str], None]
) -> tuple[TierSpeed, ...]:
    """Run all movers of all cases in every round, and return the times of each case, in order.

    Args:
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
            one.tier,
            one.direction,
            one.depth,
            one.target,
            next(series),
            tuple(next(series) for _ in one.limits),
            tuple(next(series) for _ in one.controls),
        )
        for one in cases
    )
