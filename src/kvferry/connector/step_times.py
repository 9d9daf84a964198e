"""How fast prompts are computed, by the time from one step to the next.

The engine says when each step is scheduled and when its output is taken, in the order of steps. With
asynchronous scheduling, or several stages of a pipeline, a step is scheduled while others are under way: it
begins when the one before it is done.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from kvferry.connector.speeds import Speeds

_PREFILL_TOKENS = 128
"""Tokens of a step from which on its time tells how fast prompts are computed."""


class StepTimes:
    """Measures steps for `Speeds`."""

    def __init__(self, speeds: Speeds, clock: Callable[[], float] = time.monotonic) -> None:
        self._speeds, self._clock = speeds, clock
        self._under_way: deque[tuple[float, int]] = deque()
        self._done = 0.0

    def scheduled(self, tokens: int) -> None:
        """Note that a step of so many tokens is scheduled."""
        self._under_way.append((self._clock(), tokens))

    def done(self) -> None:
        """Note that the output of the oldest step under way has been taken."""
        if not self._under_way:
            return
        (scheduled, tokens), now = self._under_way.popleft(), self._clock()
        if tokens >= _PREFILL_TOKENS:
            self._speeds.computed(tokens, now - max(scheduled, self._done))
        self._done = now
