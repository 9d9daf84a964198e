"""A circuit breaker, which pauses requests to a store that keeps failing.

Each request to a store that does not answer takes until its deadline. After some consecutive failures, the
breaker is *open*: it refuses requests for a while. Then it admits one request. If that succeeds, the breaker
closes and admits all requests; if it fails, the breaker opens again. The pattern is the *circuit breaker* of
M. Nygard, Release It!, without its counts over time windows.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from threading import Lock


class _CircuitState(Enum):
    """The state of a circuit breaker, which decides whether requests to a store are admitted.

    CLOSED admits all requests. OPEN refuses all requests during a pause. HALF_OPEN refuses all requests while
    a single request after the pause is in flight.
    """

    CLOSED = "asked as usual"
    OPEN = "left alone"
    HALF_OPEN = "one request is out to see"


class CircuitBreaker:
    """Admits requests to a store, and refuses them for a while after several have failed.

    Any thread may use the object. The breaker is in one of three states:

    - CLOSED: all requests are admitted. After `failures` consecutive failures, the state becomes OPEN.
    - OPEN: all requests are refused for `pause_seconds`. The first request after that is admitted, and the
      state becomes HALF_OPEN.
    - HALF_OPEN: all other requests are refused until that request ends. If it succeeded, the state becomes
      CLOSED, else OPEN again.

    When a request is admitted, its caller gets a *ticket* (number of state changes so far), and must return
    it with the outcome of the request. The outcome is ignored if the state has changed since the ticket was
    given. So if many requests wait for a store that does not answer, those that fail last do not prolong the
    pause.

    Args:
        failures: number of consecutive failures that opens the breaker.
        pause_seconds: time for which the breaker stays open.
        clock: function that returns monotonic seconds.
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
        """Return whether the breaker would refuse a request to the store now."""
        with self._lock:
            return self._refuses()

    def enter(self) -> int | None:
        """Ask the breaker to admit a request to the store.

        Returns:
            A ticket (number of state changes so far) for `leave` if the request is admitted; None if it is
            refused.
        """
        with self._lock:
            if self._refuses():
                return None
            if self._state is _CircuitState.OPEN:
                self._set_state(_CircuitState.HALF_OPEN)
            return self._changes

    def leave(self, ticket: int, *, succeeded: bool) -> None:
        """Record the outcome of an admitted request. Do nothing if the state has changed since the admission.

        Args:
            ticket: number that `enter` returned for the request.
            succeeded: whether the request succeeded.
        """
        with self._lock:
            if ticket != self._changes:
                return
            self._failures = 0 if succeeded else self._failures + 1
            if self._state is _CircuitState.HALF_OPEN and succeeded:
                self._set_state(_CircuitState.CLOSED)
            elif self._state is _CircuitState.HALF_OPEN or self._failures >= self._limit:
                self._until = self._clock() + self._pause_seconds
                self._set_state(_CircuitState.OPEN)

    def _refuses(self) -> bool:
        """Return whether the breaker would refuse a request to the store now. The caller holds the lock."""
        waits = self._state is _CircuitState.OPEN and self._clock() < self._until
        return waits or self._state is _CircuitState.HALF_OPEN

    def _set_state(self, state: _CircuitState) -> None:
        """Change the state of the breaker. The caller holds the lock.

        Later outcomes of requests that were admitted before the change are ignored.
        """
        self._state = state
        self._changes += 1
