"""Run the cases of `benchmarks scale`: all sizes once per round, in random order."""

from __future__ import annotations

import gc
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from benchmarks.scale import chunks, peers, requests, steps, tokens
from benchmarks.scale.case import Case
from benchmarks.scale.result import MeasuredCase, MeasuredSizes

CASES = {case.name: case for case in (chunks.CASE, peers.CASE, requests.CASE, steps.CASE, tokens.CASE)}


def measure(cases: Sequence[Case], rounds: int, progress: Callable[[str], None]) -> tuple[MeasuredCase, ...]:
    """Measure all cases one after the other, and return their figures.

    All objects that exist already are hidden from the garbage collector, as vLLM does after its start. Its
    passes over them would count for the sizes at which they happen.

    Args:
        cases: cases to measure.
        rounds: number of counted rounds of each size. Another round before them is not counted.
        progress: function that is called with a line of text before each round.

    Raises:
        ConfigError: the machine does not allow enough open files, or NIXL cannot start.
        TransferError: a peer in this process does not answer, or could not be read from.
    """
    gc.collect()
    gc.freeze()
    try:
        return tuple(measure_case(case, rounds, progress) for case in cases)
    finally:
        gc.unfreeze()


def measure_case(case: Case, rounds: int, progress: Callable[[str], None]) -> MeasuredCase:
    """Measure one case, and return its figures.

    Args:
        case: case to measure.
        rounds: number of counted rounds.
        progress: function that is called with a line of text before each round.
    """
    values: dict[tuple[str, int], list[float]] = defaultdict(list)
    progress(f"{case.name}: what is the same in every round")
    for size in case.sizes:
        for name, value in case.once(size).items():
            values[name, size].append(value)
    order = random.Random(5)  # noqa: S311 - an order of measurements, no secret
    with ExitStack() as stack:
        rounds_of = {size: stack.enter_context(case.prepare(size)) for size in case.sizes}
        for number in range(rounds + 1):
            progress(f"{case.name}: round {number} of {rounds}")
            for size in order.sample(case.sizes, len(case.sizes)):
                gc.collect()
                found = rounds_of[size]()
                for name, value in found.items() if number else ():
                    values[name, size].append(value)
    return MeasuredCase(
        name=case.name,
        noun=case.noun,
        sizes=case.sizes,
        measures=tuple(
            MeasuredSizes(measure=one, values=tuple(tuple(values[one.name, size]) for size in case.sizes))
            for one in case.measures
        ),
    )
