"""Says so when a thread that others wait for was kept from running.

Heartbeats and handshakes have deadlines of seconds, and their threads share cores and the interpreter's lock
with an engine that spins. When a peer is given up or a lease runs out, the first question is whether the
other side was silent or this side did not get to listen; a warning at the time is the answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

LATE_SECONDS = 1.0
_QUIET_SECONDS = 60.0


class DelayMonitor:
    """Watches how late one thread comes back from waiting; used by that thread alone."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Watch the thread called `name`."""
        self._name, self._clock = name, clock
        self._due = self._said = float("-inf")

    def before_wait(self, seconds: float) -> float:
        """The thread is about to wait for at most so long; returns that."""
        self._due = self._clock() + seconds
        return seconds

    def after_wait(self) -> None:
        """It runs again: warn if that is late, once a minute at most."""
        now = self._clock()
        if now - self._due > LATE_SECONDS and now - self._said > _QUIET_SECONDS:
            self._said = now
            logger.warning(
                "%s: did not run for %.1f s; peers may take this engine for dead: are there more busy "
                "processes on this machine than cores?",
                self._name, now - self._due,
            )  # fmt: skip
