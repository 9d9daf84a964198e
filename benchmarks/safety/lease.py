"""Measure the cost of the lease check.

A lease word is an integer in the producer's registered memory that changes when its blocks are reused. After
the data has arrived, a second READ of the lease word verifies that the blocks were valid all the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from benchmarks.safety.cost import ProtectionCost, SafetyJob
from kvferry.tools.bench.movers import KVFerryMover
from kvferry.tools.measuring.producer_process import ProducerProcess, use_transports
from kvferry.tools.measuring.reader import Reader
from kvferry.tools.measuring.rounds import run_rounds
from kvferry.tools.measuring.simulated import simulate_engine
from kvferry.tools.plan.side import EngineSide
from kvferry.transport import lane

TARGET = 0.02
"""Largest allowed share of a transfer's time."""


class UncheckedMover:
    """A mover that uses kvferry without the lease check."""

    name = "without"

    def __init__(self, ferry: KVFerryMover) -> None:
        """Store the mover whose lease check is skipped."""
        self._ferry, self.bytes = ferry, ferry.bytes

    def move(self) -> float:
        """Load the request once without the lease check, and return the time in seconds."""
        with _believing():
            return self._ferry.move()


def measure(job: SafetyJob, progress: Callable[[str], None]) -> list[ProtectionCost]:
    """Measure whole transfers between two processes, with and without the lease check, and return the costs.

    Args:
        job: settings of the benchmark.
        progress: function that is called with a line of text before each round.
    """
    source, destination = (
        simulate_engine(name, job.reading, EngineSide(), job.tokens, seed=seed)
        for seed, name in enumerate(("source", "destination"), 1)
    )
    with ProducerProcess([source], use_transports(None)) as producer, Reader(destination, producer) as reader:
        checked, unchecked = (
            KVFerryMover("with", reader, source),
            UncheckedMover(KVFerryMover("without", reader, source)),
        )
        on, off = run_rounds([checked.move, unchecked.move], job.repeats, progress)
    checks = tuple(check for _, _, check, _ in checked.stages[-job.repeats :])
    return [
        ProtectionCost(part="lease", work=f"transfer of {job.tokens:,} tokens", on=tuple(on), off=tuple(off)),
        ProtectionCost(
            part="lease",
            work="the READ of the lease word",
            on=checks,
            off=(0.0,) * len(checks),
            whole=tuple(on),
            target=TARGET,
        ),
    ]


@contextmanager
def _believing() -> Iterator[None]:
    """Make reading threads (lanes) skip the READ of the lease word while the block runs."""

    def believe(self: lane.Lane, read: lane._Read) -> None:
        read.data_done = time.perf_counter()
        for number, source in enumerate(read.plan.sources):
            word = read.order.lease.word(source.card.incarnation)
            self._lane.words[read.landing + number] = word

    with patch.object(lane.Lane, "_read_words", believe):
        yield
