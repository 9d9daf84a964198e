"""Run measured functions in interleaved rounds: every round runs each once, in a new random order.

The speed of a shared machine changes over time. So speeds are compared within a round, and the report has the
median over all rounds. The order is random, because a function may profit from what the one before it left in
the CPU's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


def run_rounds(
    moves: Sequence[Callable[[], float]], repeats: int, progress: Callable[[str], None] = lambda _: None
) -> list[list[float]]:
    """Call every function once per round, in a new random order each round, and return the measured times.

    Args:
        moves: functions that each move bytes once and return the time in seconds.
        repeats: number of counted rounds. One warm-up round before them is not counted.
        progress: function that is called with a line of text before each round.

    Returns:
        For each function, its time in each counted round, in seconds.
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
