"""What the lease check costs: the second READ, of the lease word, after the data has arrived."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from benchmarks.safety.cost import Cost, SafetyJob
from kvferry.bench.movers import KVFerryMover
from kvferry.bench.rounds import run_rounds
from kvferry.measuring.producer_process import ProducerProcess, use_transports
from kvferry.measuring.reader import Reader
from kvferry.measuring.simulated import simulate_engine
from kvferry.plan.side import Side
from kvferry.transport import lane

TARGET = 0.02
"""Of the time of a transfer."""


class Unchecked:
    """Moves like kvferry, but believes every lease; a `Mover`."""

    name = "without"

    def __init__(self, ferry: KVFerryMover) -> None:
        """Take over how to move."""
        self._ferry, self.bytes = ferry, ferry.bytes

    def move(self) -> float:
        """Move once; seconds."""
        with _believing():
            return self._ferry.move()


def measure(job: SafetyJob, progress: Callable[[str], None]) -> list[Cost]:
    """Measure whole transfers between two processes, with the lease check and without."""
    source, destination = (
        simulate_engine(name, job.reading, Side(), job.tokens, seed=seed)
        for seed, name in enumerate(("source", "destination"), 1)
    )
    with ProducerProcess([source], use_transports(None)) as producer, Reader(destination, producer) as reader:
        checked, unchecked = (
            KVFerryMover("with", reader, source),
            Unchecked(KVFerryMover("without", reader, source)),
        )
        on, off = run_rounds([checked, unchecked], job.repeats, progress)
    checks = tuple(check for _, _, check, _ in checked.stages[-job.repeats :])
    return [
        Cost("lease", f"transfer of {job.tokens:,} tokens", tuple(on), tuple(off)),
        Cost("lease", "the READ of the lease word", checks, (0.0,) * len(checks), tuple(on), TARGET),
    ]


@contextmanager
def _believing() -> Iterator[None]:
    """Have lanes take every lease word for the one that they expect, without reading it."""

    def believe(self: lane.Lane, agent: object, read: lane._Read) -> None:  # noqa: ARG001 - a lane calls it so
        read.words, read.data_done = True, time.perf_counter()
        for number, rank in enumerate(read.plan.ranks):
            self._landing[read.landing + number] = read.order.lease.word(rank.source.incarnation)

    with patch.object(lane.Lane, "_read_words", believe):
        yield
