"""Access to a bucket that counts failed requests, logs the first of each kind, and pauses after several.

The pattern is the *circuit breaker* of M. Nygard, Release It!, without its counts over time windows.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock

from kvferry.tiers.objects.client import BucketClient
from kvferry.tiers.objects.faults import Fault, Unavailable

_log = logging.getLogger(__name__)

# Number of consecutive failures after which requests pause.
_FAILURES = 3


class GuardedBucket:
    """Access to a bucket through one circuit breaker for reads and another for writes. Thread-safe.

    After three consecutive failures, requests are refused for `pause_seconds`.
    """

    def __init__(self, bucket: BucketClient, pause_seconds: float, clock: Callable[[], float]) -> None:
        self._bucket = bucket
        # Separate, because a store may permit or serve only one of them.
        self._reads = CircuitBreaker(_FAILURES, pause_seconds, clock)
        self._writes = CircuitBreaker(_FAILURES, pause_seconds, clock)
        self._faults: Counter[Fault] = Counter()
        self._lock = Lock()

    @property
    def faults(self) -> dict[Fault, int]:
        """Number of requests that failed or were refused, for each reason. A missing object is no failure."""
        with self._lock:
            return dict(self._faults)

    @property
    def reads_paused(self) -> bool:
        return self._reads.is_open

    def reading(self) -> AbstractContextManager[BucketClient]:
        """Give the client for reads, or raise `Unavailable` if reads are paused."""
        return self._guard(self._reads)

    def writing(self) -> AbstractContextManager[BucketClient]:
        """Give the client for writes, or raise `Unavailable` if writes are paused."""
        return self._guard(self._writes)

    @contextmanager
    def _guard(self, breaker: CircuitBreaker) -> Iterator[BucketClient]:
        """Give the client. `Unavailable` in the ``with`` statement counts as a failure."""
        ticket = breaker.enter()
        if ticket is None:
            self._count(Fault.PAUSED)
            raise Unavailable(Fault.PAUSED)
        succeeded = True
        try:
            yield self._bucket
        except Unavailable as error:
            succeeded = False
            if self._count(error.fault):
                # Log the error as text: a log record with the exception would keep the request's memory.
                _log.warning("object tier %s: %s; %s", self._bucket.url, str(error), error.fault.advice)
            raise
        finally:
            breaker.leave(ticket, succeeded=succeeded)

    def _count(self, fault: Fault) -> bool:
        """Count a failure. Return whether this is the first for its reason."""
        with self._lock:
            self._faults[fault] += 1
            return self._faults[fault] == 1


class CircuitBreaker:
    """Admits requests to a store, and refuses them for a while after several have failed. Thread-safe.

    CLOSED ─`failures` in a row─▶ OPEN ─first request after `pause_seconds`─▶ HALF_OPEN
    HALF_OPEN ─it succeeded─▶ CLOSED
    HALF_OPEN ─it failed─▶ OPEN
    """

    def __init__(self, failures: int, pause_seconds: float, clock: Callable[[], float]) -> None:
        self._limit = failures
        self._pause_seconds = pause_seconds
        self._clock = clock
        self._lock = Lock()
        self._failures = 0
        self._until: float | None = None  # end of the pause; None while CLOSED
        self._trying = False  # whether a request is under way since the pause: HALF_OPEN
        self._changes = 0

    @property
    def is_open(self) -> bool:
        with self._lock:
            return self._refuses()

    def enter(self) -> int | None:
        """Return a ticket for `leave` if a request is admitted; None if it is refused."""
        with self._lock:
            if self._refuses():
                return None
            if self._until is not None:
                self._trying, self._changes = True, self._changes + 1
            return self._changes

    def leave(self, ticket: int, *, succeeded: bool) -> None:
        """Record the outcome of an admitted request."""
        with self._lock:
            # The ticket counts changes of state. If many requests wait for a store that does not answer,
            # those that fail last must not prolong the pause.
            if ticket != self._changes:
                return
            self._failures = 0 if succeeded else self._failures + 1
            if succeeded and not self._trying:
                return
            if succeeded:
                self._until = None
            elif self._trying or self._failures >= self._limit:
                self._until = self._clock() + self._pause_seconds
            else:
                return
            self._trying, self._changes = False, self._changes + 1

    def _refuses(self) -> bool:
        return self._until is not None and (self._trying or self._clock() < self._until)
