"""Compare movers in interleaved rounds (`measuring.rounds`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from kvferry.tools.bench.movers import KVFerryMover, Mover, memcpy, raw_nixl
from kvferry.tools.measuring.raw_reads import RawReads
from kvferry.tools.measuring.reader import Reader
from kvferry.tools.measuring.rounds import Spread, run_rounds
from kvferry.tools.measuring.simulated import SimulatedEngine


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


@dataclass(frozen=True, slots=True)
class TransferComparison:
    """The times of moving one request's KV with kvferry, with NIXL alone, and with memcpy.

    Attributes:
        others: times of NIXL alone with large descriptors, of NIXL alone with the same descriptors as
            kvferry, and of memcpy, in this order.
        stages: median seconds of kvferry's planning, of its reading, of its lease check, and of the rest.
    """

    ferry: MoverRounds
    others: tuple[MoverRounds, ...]
    stages: tuple[float, float, float, float]


def compare(
    reader: Reader, source: SimulatedEngine, repeats: int, progress: Callable[[str], None]
) -> TransferComparison:
    """Move a request's KV with kvferry, with NIXL alone, and with memcpy, and return the times.

    Args:
        repeats: number of counted rounds. One warm-up round before them is not counted.
        progress: function that is called with a line of text before each round.

    Raises:
        TransferError: a transfer failed, or kvferry moved wrong bytes.
    """
    ferry = KVFerryMover("kvferry", reader, source)
    with closing(RawReads(reader)) as raw:
        movers: list[Mover] = [
            ferry,
            raw_nixl("(a) raw NIXL, 2 MiB descriptors", raw, raw.equal_descriptors(ferry.bytes)),
            raw_nixl("(b) raw NIXL, same descriptors", raw, raw.same_descriptors(source)),
            memcpy(reader),
        ]
        seconds = run_rounds([mover.move for mover in movers], repeats, progress)
    all_series = [MoverRounds(m.name, m.bytes, tuple(s)) for m, s in zip(movers, seconds, strict=True)]
    # The first move is the warm-up round.
    planning, reading, check, rest = (
        # The first round does not count, as in `run_rounds`.
        Spread.of(column).median
        for column in zip(*ferry.stages[1:], strict=True)
    )
    return TransferComparison(all_series[0], tuple(all_series[1:]), (planning, reading, check, rest))
