"""How long a request has been kept waiting."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Waiting:
    """The time that a request was told to wait, in all; not the time that it waited for the engine itself.

    Attributes:
        seconds: until it was last asked for.
    """

    seconds: float = 0.0
    _since: float | None = None

    def until(self, now: float) -> float:
        """Return the seconds of waiting, with the last wait if one was begun; it has ended now."""
        if self._since is not None:
            self.seconds += now - self._since
            self._since = None
        return self.seconds

    def begin(self, now: float) -> None:
        """The request is told to wait until it is asked for again."""
        self._since = now
