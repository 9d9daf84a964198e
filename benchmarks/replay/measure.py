"""Runs of all cases in alternation, each in a new process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks.order import rotated
from benchmarks.replay.cases import CASES, Measured, run_case


def measure(trace: Path, rounds: int, progress: Callable[[str], None]) -> Mapping[str, Sequence[Measured]]:
    """Run every case `rounds` times.

    Args:
        trace: trace to replay.
        rounds: number of runs of every case.
        progress: called with a text before each run.

    Returns:
        Runs of each case, in the order of the rounds.
    """
    found: dict[str, list[Measured]] = {name: [] for name in CASES}
    for number in range(rounds):
        for name in rotated(list(CASES), number):
            progress(f"round {number + 1} of {rounds}: {name}")
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                found[name].append(process.submit(run_case, name, trace).result())
    return found
