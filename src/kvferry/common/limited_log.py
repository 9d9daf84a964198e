"""Limit the rate of warnings that requests and peers can cause."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kvferry.common.units import counted


class LimitedLog:
    """A logger of warnings that limits their rate, so that clients and peers cannot fill the log.

    In each window of `seconds`, at most `most` warnings are logged, one for each cause. The next logged line
    says how many warnings were left out. Not thread-safe.
    """

    def __init__(
        self,
        logger: logging.Logger,
        *,
        most: int = 20,
        seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger, self._most, self._seconds, self._clock = logger, most, seconds, clock
        self._said: set[str] = set()
        self._began = clock()
        self._left_out = 0

    def say(self, cause: str, text: str, error: BaseException | None = None) -> None:
        """Log a warning, with the traceback of an unexpected error, unless the rate is too high."""
        now = self._clock()
        if now - self._began >= self._seconds:
            self._began = now
            self._said.clear()
        if cause in self._said or len(self._said) >= self._most:
            self._left_out += 1
            return
        self._said.add(cause)
        left, self._left_out = self._left_out, 0
        more = f" ({counted(left, 'more warning')} left out before this one)" if left else ""
        self._logger.warning("%s%s", text, more, exc_info=error)
