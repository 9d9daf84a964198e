"""How long a step that computes nothing waits for loads, so that requests are computed together.

The engine would only sleep and look again, so the step waits for the first load to end. It then waits for
others if that is expected to pay. A step of a few tokens takes about as long for one request as for many. If
the engine computes at once, the requests whose loads are missing get their first tokens one step later than
those whose loads have ended. If it waits, all requests are late by the wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# A request that arrives meanwhile is delayed by the wait.
IDLE_WAIT_SECONDS = 0.003
"""Maximum seconds that a step of an idle engine waits for a load under way to end."""

MOST_STEP_SECONDS = 0.020
"""Maximum time of a step that the wait is compared with, in case a few steps took unusually long."""


def saved_seconds(step_seconds: float, ended: int, missing: int) -> float:
    """Return how much sooner requests get their first tokens, on average, if one step computes all of them.

    Otherwise one step computes the requests whose loads have `ended`, the next one those whose loads are
    `missing`.

    >>> saved_seconds(0.016, ended=1, missing=7)
    0.014
    """
    return step_seconds * missing / (ended + missing)


def wait_until(began: float, ends: Sequence[float], expected: Iterable[float], step_seconds: float) -> float:
    """Return the time until which a step that computes nothing waits for the next load to end.

    After the first load, the step waits in all at most as long as a step takes, and for each further load at
    most as long as all loads that are expected to end meanwhile save.

    Args:
        began: time when the step began to wait.
        ends: times when the loads that the step will report have ended, the earliest first.
        expected: times when the loads under way are expected to end.
        step_seconds: time of a step that computes a few tokens; 0 if unknown.
    """
    if not ends:
        return began + IDLE_WAIT_SECONDS
    step_seconds, ended, last, missing = min(step_seconds, MOST_STEP_SECONDS), len(ends), ends[-1], 0
    under_way = list(expected)
    latest = last + saved_seconds(step_seconds, ended, len(under_way))
    for end in under_way:
        missing += end <= latest
    return min(last + saved_seconds(step_seconds, ended, missing), ends[0] + step_seconds)
