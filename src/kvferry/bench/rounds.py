"""The comparison: every round runs every mover once, in an order of its own.

Machines are shared and their speed drifts, so a ratio is taken within a round, and the median over rounds is
reported. The order is drawn: what a mover leaves in the caches helps another in some rounds only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from kvferry.bench.movers import Ferry, Memcpy, Mover, RawNixl
from kvferry.measuring.raw_reads import RawReads
from kvferry.measuring.reader import Reader
from kvferry.measuring.simulated import SimulatedEngine
from kvferry.measuring.spread import Spread


@dataclass(frozen=True, slots=True)
class Series:
    """All rounds of one mover.

    Attributes:
        name: the mover's.
        bytes: useful bytes per round.
        seconds: per round.
    """

    name: str
    bytes: int
    seconds: tuple[float, ...]

    @property
    def gigabytes_per_second(self) -> Spread:
        """10⁹ bytes per second."""
        return Spread.of([self.bytes / s / 1e9 for s in self.seconds])

    def times(self, other: Series) -> Spread:
        """How many times as fast as `other` this is, round by round."""
        return Spread.of(
            [
                (self.bytes / mine) / (other.bytes / theirs)
                for mine, theirs in zip(self.seconds, other.seconds, strict=True)
            ]
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """All movers.

    Attributes:
        ferry: kvferry's series.
        others: raw NIXL with large descriptors, with the same descriptors, and memcpy.
        stages: medians of kvferry's time in seconds: planning, reading, lease check, all the rest.
    """

    ferry: Series
    others: tuple[Series, ...]
    stages: tuple[float, float, float, float]


def compare(
    reader: Reader, source: SimulatedEngine, repeats: int, progress: Callable[[str], None]
) -> Comparison:
    """Move a request in every way, `repeats` rounds after one that does not count.

    Args:
        reader: reads.
        source: what is read from.
        repeats: rounds.
        progress: told what is going on.

    Raises:
        TransferError: a mover failed, or kvferry moved other bytes than it was asked to.
    """
    ferry = Ferry("kvferry", reader, source)
    with closing(RawReads(reader)) as raw:
        movers: list[Mover] = [
            ferry,
            RawNixl("(a) raw NIXL, 2 MiB descriptors", raw, raw.equal_descriptors(ferry.bytes)),
            RawNixl("(b) raw NIXL, same descriptors", raw, raw.same_descriptors(source)),
            Memcpy(reader),
        ]
        seconds = run_rounds(movers, repeats, progress)
    all_series = [Series(m.name, m.bytes, tuple(s)) for m, s in zip(movers, seconds, strict=True)]
    planning, reading, check, rest = (
        Spread.of(column).median for column in zip(*ferry.stages[1:], strict=True)
    )
    return Comparison(all_series[0], tuple(all_series[1:]), (planning, reading, check, rest))


def run_rounds(movers: Sequence[Mover], repeats: int, progress: Callable[[str], None]) -> list[list[float]]:
    """Seconds of every mover in every round; a round before that does not count."""
    progress("moving, a round that does not count")
    for mover in movers:
        mover.move()
    draw = np.random.default_rng(7)
    seconds: list[list[float]] = [[] for _ in movers]
    for number in range(repeats):
        progress(f"moving, round {number + 1} of {repeats}")
        for which in draw.permutation(len(movers)):
            seconds[which].append(movers[which].move())
    return seconds
