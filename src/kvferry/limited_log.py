"""Limit the rate of warnings that requests and peers can cause."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable


class LimitedLog:
    """A logger of warnings with a limited rate. Not thread-safe.

    Time is divided into windows. In each window a cause is logged once, and at most `most` causes are logged.
    So clients and peers cannot fill the log or memory. The next logged line tells how many warnings were left
    out.
    """

    def __init__(
        self,
        logger: logging.Logger,
        *,
        most: int = 20,
        seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the log. The first window begins now.

        Args:
            logger: logger for the warnings.
            most: maximum number of warnings per window.
            seconds: length of a window, in seconds.
            clock: function that returns the current time in seconds, monotonic.
        """
        self._logger, self._most, self._seconds, self._clock = logger, most, seconds, clock
        self._said: set[str] = set()
        self._began = clock()
        self._left_out = 0

    def say(self, cause: str, text: str, error: BaseException | None = None) -> None:
        """Log a warning, unless its cause was already logged in this window or the window's limit is reached.

        Args:
            cause: key of the cause. Of all warnings with the same key, one per window is logged.
            text: text of the warning.
            error: unexpected exception whose traceback is logged; None if there is no exception.
        """
        now = self._clock()
        if now - self._began >= self._seconds:
            self._began = now
            self._said.clear()
        if cause in self._said or len(self._said) >= self._most:
            self._left_out += 1
            return
        self._said.add(cause)
        left, self._left_out = self._left_out, 0
        more = f" ({left} more warnings were left out before this one)" if left else ""
        self._logger.warning("%s%s", text, more, exc_info=error)
