"""Leaving alone what keeps failing.

Waiting for a store that does not answer costs its whole deadline, each time. After some failures in a row
nothing is asked any more for a while; then one request is let through to see, and its outcome decides.
(The *circuit breaker* of M. Nygard, Release It!, without its counts over time windows.)
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from threading import Lock


class _CircuitState(Enum):
    CLOSED = "asked as usual"
    OPEN = "left alone"
    HALF_OPEN = "one request is out to see"


class CircuitBreaker:
    """Whether something is worth asking. Any thread may use it.

    ::

        CLOSED --failures in a row--> OPEN --pause_seconds, first to ask--> HALF_OPEN --it worked--> CLOSED
                                       ^---------------------------------it failed---'

    Whoever is let in gets a ticket and gives it back with the outcome, whatever happens. A ticket from before
    the last change of state says nothing about now and is ignored: of many requests that a dead store lets
    wait together, the last to fail does not prolong the rest.

    Args:
        failures: in a row, that open it.
        pause_seconds: how long it then stays open.
        clock: monotonic seconds.
    """

    def __init__(self, failures: int, pause_seconds: float, clock: Callable[[], float]) -> None:
        self._limit = failures
        self._pause_seconds = pause_seconds
        self._clock = clock
        self._lock = Lock()
        self._state = _CircuitState.CLOSED
        self._failures = 0
        self._until = 0.0
        self._changes = 0

    @property
    def is_open(self) -> bool:
        """Whether `enter` would now turn a request away."""
        with self._lock:
            return self._turns_away()

    def enter(self) -> int | None:
        """A ticket for one request, to be given back to `leave`; None where nothing should be asked."""
        with self._lock:
            if self._turns_away():
                return None
            if self._state is _CircuitState.OPEN:
                self._become(_CircuitState.HALF_OPEN)
            return self._changes

    def leave(self, ticket: int, *, worked: bool) -> None:
        """Say what became of the request that was let in with this ticket."""
        with self._lock:
            if ticket != self._changes:
                return
            self._failures = 0 if worked else self._failures + 1
            if self._state is _CircuitState.HALF_OPEN and worked:
                self._become(_CircuitState.CLOSED)
            elif self._state is _CircuitState.HALF_OPEN or self._failures >= self._limit:
                self._until = self._clock() + self._pause_seconds
                self._become(_CircuitState.OPEN)

    def _turns_away(self) -> bool:
        waits = self._state is _CircuitState.OPEN and self._clock() < self._until
        return waits or self._state is _CircuitState.HALF_OPEN

    def _become(self, state: _CircuitState) -> None:
        self._state = state
        self._changes += 1
