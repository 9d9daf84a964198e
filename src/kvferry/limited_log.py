"""Rate limit for warnings that requests and peers can cause."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable


class LimitedLog:
    """Warnings of one module, limited in number. Not thread-safe: one thread uses it.

    Time is cut into windows. In each window a cause is logged once, and `most` causes at most, so neither the
    log nor memory grows with what others send. The next line says how many were left out.
    """

    def __init__(
        self,
        logger: logging.Logger,
        *,
        most: int = 20,
        seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin.

        Args:
            logger: writes the lines.
            most: lines of a window.
            seconds: length of a window.
            clock: seconds.
        """
        self._logger, self._most, self._seconds, self._clock = logger, most, seconds, clock
        self._said: set[str] = set()
        self._began = clock()
        self._left_out = 0

    def say(self, cause: str, text: str, error: BaseException | None = None) -> None:
        """Log `text`, with the traceback of `error`, unless its cause was logged in this window.

        Args:
            cause: what repeated lines have in common.
            text: the line.
            error: something unexpected, to be shown in full.
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
