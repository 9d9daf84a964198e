"""The time that a request has spent waiting for a source or for room."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Waiting:
    """Adds up the times between telling a request to wait and its next admission.

    Time that it waits for the engine itself does not count.

    Attributes:
        seconds: the sum so far.
    """

    seconds: float = 0.0
    _since: float | None = None

    def until(self, now: float) -> float:
        """End the wait that was begun, if any; return all seconds of waiting."""
        if self._since is not None:
            self.seconds += now - self._since
            self._since = None
        return self.seconds

    def begin(self, now: float) -> None:
        """Begin a wait, which ends with the next `until`."""
        self._since = now
