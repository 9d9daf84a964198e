"""Times of the engine's steps. They show how fast it computes prompts, and whether it is idle.

The engine reports when each step is scheduled and when its output is taken, in the order of steps. With
asynchronous scheduling or pipeline parallelism, a step is scheduled while others are under way. Such a step
counts as begun when the step before it is done.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from kvferry.connector.speeds import Speeds

_PREFILL_TOKENS = 128
"""Minimum number of tokens of a step to be measured. Smaller steps say little about prompt computation."""

_PAUSE_SECONDS = 0.005
"""Seconds without a step after which the engine counts as idle. While requests run, steps follow at once."""


class StepTimes:
    """Measures the duration of the engine's steps, and records how fast the engine computes prompts."""

    def __init__(self, speeds: Speeds, clock: Callable[[], float] = time.monotonic) -> None:
        self._speeds, self._clock = speeds, clock
        self._under_way: deque[tuple[float, int]] = deque()
        self._done, self._last_tokens = 0.0, 0
        self._computing = 0

    @property
    def computing(self) -> bool:
        """Whether a step that computes tokens has been scheduled and is not done."""
        return self._computing > 0

    @property
    def idle(self) -> bool:
        """True if the engine computes no request: its last step computed none, or was done some time ago."""
        if self.computing:
            return False
        return not self._last_tokens or self._clock() - self._done > _PAUSE_SECONDS

    def scheduled(self, tokens: int) -> float:
        """Record that the engine schedules a step of `tokens` tokens now. Return the time, in seconds."""
        now = self._clock()
        self._under_way.append((now, tokens))
        self._last_tokens = tokens
        self._computing += tokens > 0
        return now

    def done(self) -> None:
        """Record that the oldest step under way is done: the engine has taken the step's output."""
        if not self._under_way:
            return
        (scheduled, tokens), now = self._under_way.popleft(), self._clock()
        self._computing -= tokens > 0
        if tokens >= _PREFILL_TOKENS:
            self._speeds.record_computation(tokens, now - max(scheduled, self._done))
        self._done = now
