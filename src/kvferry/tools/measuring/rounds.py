"""Run measured functions in interleaved rounds: every round runs each once, in a new random order.

The speed of a shared machine changes over time. So speeds are compared within a round, and the report has the
median over all rounds. The order is random, because a function may profit from what the one before it left in
the CPU's cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np


def run_rounds(
    moves: Sequence[Callable[[], float]], repeats: int, progress: Callable[[str], None] = lambda _: None
) -> list[list[float]]:
    """Call every function once per round, in a new order, and return its seconds in each counted round.

    One warm-up round comes before the `repeats` counted rounds.
    """
    progress("moving, a round that does not count")
    for move in moves:
        move()
    # A fixed seed: two runs differ by the machine only.
    draw = np.random.default_rng(7)
    seconds: list[list[float]] = [[] for _ in moves]
    for number in range(repeats):
        progress(f"moving, round {number + 1} of {repeats}")
        for which in draw.permutation(len(moves)):
            seconds[which].append(moves[which]())
    return seconds


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """The properties of a machine that affect measurements. `transports` is UCX_TLS, None if unset."""

    cores: int
    cpu: str
    transports: str | None


def machine_facts() -> MachineFacts:
    """Return the properties of this machine and process."""
    # A container may use fewer cores than the machine has.
    return MachineFacts(len(os.sched_getaffinity(0)), _cpu_name(), os.environ.get("UCX_TLS"))


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown processor"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown processor"


@dataclass(frozen=True, slots=True)
class Spread:
    """The median, the lowest and the highest of several measured values.

    >>> Spread.of([3.0, 1.0, 2.0, 9.0])
    Spread(median=2.5, low=1.0, high=9.0)
    """

    # There is no mean, because a single slow round on a shared machine would dominate it.
    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Return the median, the lowest and the highest of at least one value."""
        return Spread(float(np.median(values)), float(min(values)), float(max(values)))


def percentile(values: Sequence[float], q: float) -> float:
    """Return the smallest value v such that at least `q` percent of the values are at most v.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 99)
    4.0
    """
    return float(np.percentile(values, q, method="inverted_cdf"))
