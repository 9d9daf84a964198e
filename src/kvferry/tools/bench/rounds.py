"""The times of movers in interleaved rounds (`measuring.rounds`), and cases of tiers that compare them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvferry.tools.bench.movers import Mover
from kvferry.tools.measuring.rounds import Spread, run_rounds

MoverT_co = TypeVar("MoverT_co", covariant=True)


@dataclass(frozen=True, slots=True)
class MoverRounds:
    """The times of one mover in all counted rounds, in seconds, and the bytes that it delivers in each."""

    name: str
    bytes: int
    seconds: tuple[float, ...]

    @property
    def gigabytes_per_second(self) -> Spread:
        """Speed in 10⁹ bytes per second."""
        return Spread.of([self.bytes / s / 1e9 for s in self.seconds])

    def speed_ratio(self, other: MoverRounds) -> Spread:
        """Return this mover's speed as a multiple of another's of the same measurement, round by round."""
        return Spread.of(
            [
                (self.bytes / mine) / (other.bytes / theirs)
                for mine, theirs in zip(self.seconds, other.seconds, strict=True)
            ]
        )


def measure_movers(
    movers: Sequence[Mover], repeats: int, progress: Callable[[str], None]
) -> list[MoverRounds]:
    """Run all movers once to warm up, then in `repeats` rounds, and return the times of each."""
    seconds = run_rounds([mover.move for mover in movers], repeats, progress)
    return [MoverRounds(m.name, m.bytes, tuple(s)) for m, s in zip(movers, seconds, strict=True)]


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
        depth: number of chunks in flight, or of threads for the host tier.
        target: speed that kvferry should reach, as a share of the speed of the fastest mover in `limits`.
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
    """Run all movers of all cases in every round, as `measure_movers`, and return the times of each case."""
    movers = [mover for one in cases for mover in (one.ours, *one.limits, *one.controls)]
    series = iter(measure_movers(movers, repeats, progress))
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
