"""Measure loads between two processes with each transfer strategy, and the planner's choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.planning.strategy import Strategy
from kvferry.tools.bench.movers import KVFerryMover
from kvferry.tools.measuring.producer_process import ProducerProcess, use_transports
from kvferry.tools.measuring.reader import Reader
from kvferry.tools.measuring.rounds import MachineFacts, Spread, machine_facts, run_rounds
from kvferry.tools.measuring.simulated import SimulatedEngine, plain_engine

LAYOUTS = ("BLHNC", "LBNHC")
"""Layouts of the engines that are read from. The reader has the first."""

COMPARED = (Strategy.DIRECT, Strategy.STAGED, Strategy.SHARED)


@dataclass(frozen=True, slots=True)
class LayoutTimes:
    """The loads from one engine.

    Attributes:
        layout: memory layout of the engine.
        seconds: time of each round, by strategy.
        chosen: strategy that the planner chooses by itself.
        read_bytes_per_second: speed of READs from the engine, as measured at first contact.
    """

    layout: str
    seconds: dict[Strategy, list[float]]
    chosen: str
    read_bytes_per_second: float

    def ratio(self, strategy: Strategy) -> Spread:
        """Return the speed as a multiple of that of direct READs, round by round."""
        direct = self.seconds[Strategy.DIRECT]
        return Spread.of([a / b for a, b in zip(direct, self.seconds[strategy], strict=True)])


@dataclass(frozen=True, slots=True)
class MeasuredSharing:
    """All results of `benchmarks shared`.

    Attributes:
        bytes: size of a load.
        machine: properties of the machine.
        layouts: loads from each engine.
    """

    bytes: int
    machine: MachineFacts
    layouts: tuple[LayoutTimes, ...]


def measure(size: int, repeats: int, transports: str, progress: Callable[[str], None]) -> MeasuredSharing:
    """Load a request from both engines with every strategy in turn, and check the bytes each time.

    Args:
        size: size of the request's KV in bytes, about.
        repeats: number of counted rounds.
        transports: value of UCX_TLS, which stays set in this process.
        progress: function that is called with a line of text before each step.

    Raises:
        TransferError: the other process died, or wrong bytes arrived.
    """
    settings = use_transports(transports)
    sources = [plain_engine(layout, size, layout=layout) for layout in LAYOUTS]
    reader_engine = plain_engine("destination", size, layout=LAYOUTS[0])
    progress("starting the producer process")
    with (
        ProducerProcess(sources, settings) as producer,
        Reader(reader_engine, producer, range(len(sources))) as reader,
    ):
        movers = {
            (number, strategy): KVFerryMover(layout, reader, source, peer=number, strategy=strategy)
            for number, (layout, source) in enumerate(zip(LAYOUTS, sources, strict=True))
            for strategy in COMPARED
        }
        seconds = dict(
            zip(
                movers,
                run_rounds([mover.move for mover in movers.values()], repeats, progress),
                strict=True,
            )
        )
        layouts = tuple(
            _times(reader, number, source, {one: seconds[number, one] for one in COMPARED})
            for number, source in enumerate(sources)
        )
        return MeasuredSharing(reader.bytes, machine_facts(), layouts)


def _times(
    reader: Reader, number: int, source: SimulatedEngine, seconds: dict[Strategy, list[float]]
) -> LayoutTimes:
    found = reader.figures(source, number)
    strategy = "+".join(found.strategies_by_group[0])
    return LayoutTimes(LAYOUTS[number], seconds, strategy, found.read_bytes_per_second)
