"""A circuit breaker, which pauses requests to a store that keeps failing.

Each request to a store that does not answer costs the whole deadline. After some failures in a row, the
breaker refuses requests for a while. Then it admits one request, whose outcome closes or reopens it. (The
*circuit breaker* of M. Nygard, Release It!, without its counts over time windows.)
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
    """A breaker that admits or refuses requests. Any thread may use it.

    ::

        CLOSED --failures in a row--> OPEN --pause_seconds, first to ask--> HALF_OPEN --it worked--> CLOSED
                                       ^---------------------------------it failed---'

    An admitted request gets a ticket and always returns it with its outcome. A ticket from before the last
    change of state is ignored. So when many requests wait for a dead store, the last one to fail does not
    prolong the pause.

    Args:
        failures: number of failures in a row that opens the breaker.
        pause_seconds: time that it then stays open.
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
        """Return whether `enter` would refuse a request now."""
        with self._lock:
            return self._turns_away()

    def enter(self) -> int | None:
        """Return a ticket for one request, to be passed to `leave`; None if the request is refused."""
        with self._lock:
            if self._turns_away():
                return None
            if self._state is _CircuitState.OPEN:
                self._become(_CircuitState.HALF_OPEN)
            return self._changes

    def leave(self, ticket: int, *, worked: bool) -> None:
        """Record the outcome of the request that got this ticket."""
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
