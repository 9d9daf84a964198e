"""Log a warning when a thread with deadlines runs late.

The threads that send heartbeats and do handshakes share cores and Python's global lock with a busy engine. If
a peer times out or a lease expires, either the other side was silent or this thread did not run. The warning
reports the second case.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

LATE_SECONDS = 1.0
_QUIET_SECONDS = 60.0


class DelayMonitor:
    """Measures how late one thread wakes up from waiting, and logs a warning if it is very late."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._clock = name, clock
        self._due = self._said = float("-inf")

    def before_wait(self, seconds: float) -> float:
        """Record that the thread is about to wait for at most `seconds`, and return them."""
        self._due = self._clock() + seconds
        return seconds

    def after_wait(self) -> None:
        now = self._clock()
        # A machine that is too busy stays so. One line a minute is enough.
        if now - self._due > LATE_SECONDS and now - self._said > _QUIET_SECONDS:
            self._said = now
            logger.warning(
                "%s: did not run for %.1f s; peers may take this engine for dead: are there more busy "
                "processes on this machine than cores?",
                self._name, now - self._due,
            )  # fmt: skip
