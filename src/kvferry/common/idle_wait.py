"""How long a step of an engine that computes nothing waits for results of threads.

The engine would only sleep and look again. A request that arrives meanwhile is delayed by the wait.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event

IDLE_WAIT_SECONDS = 0.003
"""Maximum seconds until the first result."""

# What arrives in the same step is handled together, in about the time of one.
BURST_SECONDS, GAP_SECONDS = 0.010, 0.001
"""After a result, maximum seconds of the whole wait, and until the next result."""


def wait_for_results(
    arrived: Event, pending: Callable[[], bool], take: Callable[[], bool], clock: Callable[[], float]
) -> None:
    """Wait for results, and longer only while they keep coming.

    Args:
        arrived: set by the threads after each result.
        pending: return whether results are still to come.
        take: clear `arrived`, then take the results. Return whether there were any.
    """
    began = clock()
    until = began + IDLE_WAIT_SECONDS
    while pending() and (left := until - clock()) > 0:
        arrived.wait(left)
        if take():
            until = min(began + BURST_SECONDS, clock() + GAP_SECONDS)
