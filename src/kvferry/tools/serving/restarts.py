"""Decide when an engine that has ended is started again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Limits of an engine's restarts.

    The wait doubles with each restart in a row. An engine that ran for `stable_seconds` begins a new row.

    >>> [RestartPolicy().wait_seconds(restart) for restart in (1, 2, 3, 8)]
    [1.0, 2.0, 4.0, 60.0]

    Attributes:
        limit: largest number of restarts in a row of one engine; 0 to restart none.
    """

    limit: int = 5
    first_seconds: float = 1.0
    longest_seconds: float = 60.0
    stable_seconds: float = 600.0

    def wait_seconds(self, restart: int) -> float:
        """Return the wait before a restart in seconds, by its number in its row, from 1."""
        # A power of 2 beyond 1023 overflows.
        return min(self.first_seconds * 2.0 ** min(restart - 1, 32), self.longest_seconds)


class Restarts:
    """The restarts of one engine.

    Attributes:
        in_row: number of restarts since the engine last ran for the policy's `stable_seconds`.
        due: monotonic seconds of the next start; None if the engine runs, or is not started again.
        starting: True from a restart until the engine is ready.
        given_up: True if the engine has used up its restarts.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self.in_row = 0
        self.due: float | None = None
        self.starting = False
        self.given_up = False

    def on_ended(self, now: float, ran_seconds: float) -> float | None:
        """Plan the next start of an engine that has ended, and return the wait before it in seconds.

        Return None if the engine has used up its restarts.

        Args:
            now: monotonic seconds.
            ran_seconds: time from the engine's start to its end; 0 if it was never ready.
        """
        if ran_seconds >= self._policy.stable_seconds:
            self.in_row = 0
        self.starting = False
        if self.in_row >= self._policy.limit:
            self.given_up = True
            return None
        self.in_row += 1
        wait = self._policy.wait_seconds(self.in_row)
        self.due = now + wait
        return wait

    def on_started(self) -> None:
        self.due, self.starting = None, True
