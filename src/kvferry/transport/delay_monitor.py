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
    """Measures how late one thread wakes up from waiting, and logs a warning if it is very late.

    Only that thread may use the monitor.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Create a monitor for one thread.

        Args:
            name: name of the thread in the warning.
            clock: function that returns the current time in seconds.
        """
        self._name, self._clock = name, clock
        self._due = self._said = float("-inf")

    def before_wait(self, seconds: float) -> float:
        """Record that the thread is about to wait for at most `seconds`.

        Return `seconds`, so that the call can be the timeout argument of the wait.
        """
        self._due = self._clock() + seconds
        return seconds

    def after_wait(self) -> None:
        """Record that the thread has woken up from waiting.

        If it woke up more than `LATE_SECONDS` too late, log a warning, at most once a minute.
        """
        now = self._clock()
        if now - self._due > LATE_SECONDS and now - self._said > _QUIET_SECONDS:
            self._said = now
            logger.warning(
                "%s: did not run for %.1f s; peers may take this engine for dead: are there more busy "
                "processes on this machine than cores?",
                self._name, now - self._due,
            )  # fmt: skip
