"""The time that a request has spent waiting for a source or for room."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Waiting:
    """A stopwatch for the time that one request waits for a source of KV or for free blocks.

    A wait begins (`begin`) when the request cannot be admitted for one of these reasons, and ends (`until`)
    when the engine next tries to admit the request. Other time in the engine's queue does not count.

    Attributes:
        seconds: sum of all finished waits, in seconds.
    """

    seconds: float = 0.0
    _since: float | None = None

    def until(self, now: float) -> float:
        """End the current wait, if any, at `now` (monotonic seconds); return the total seconds of waiting."""
        if self._since is not None:
            self.seconds += now - self._since
            self._since = None
        return self.seconds

    def begin(self, now: float) -> None:
        """Begin a wait at `now` (monotonic seconds). The next call of `until` ends it."""
        self._since = now
