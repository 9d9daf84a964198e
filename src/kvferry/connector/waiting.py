"""The time that a request has spent waiting for a source or for room."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Waiting:
    """A stopwatch for the time that one request waits for a source of KV or for free blocks.

    Each wait lasts from `begin` to the request's next admission. Time spent waiting for the engine does not
    count.

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
