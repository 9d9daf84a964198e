"""Access to a bucket that counts failed requests, logs the first of each kind, and pauses after several."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock

from kvferry.tiers.objects.circuit_breaker import CircuitBreaker
from kvferry.tiers.objects.client import BucketClient
from kvferry.tiers.objects.faults import Fault, Unavailable

_log = logging.getLogger(__name__)

# Number of consecutive failures after which requests pause.
_FAILURES = 3


class GuardedBucket:
    """Access to a bucket through one circuit breaker for reads and another for writes.

    A *circuit breaker* refuses requests for a while after several have failed. Reads and writes pause
    separately, because a store may permit or serve only one of them. Any thread may use the object.

    Args:
        bucket: client that makes the requests.
        pause_seconds: time for which requests are refused after three consecutive failures.
        clock: function that returns monotonic seconds.
    """

    def __init__(self, bucket: BucketClient, pause_seconds: float, clock: Callable[[], float]) -> None:
        self._bucket = bucket
        self._reads = CircuitBreaker(_FAILURES, pause_seconds, clock)
        self._writes = CircuitBreaker(_FAILURES, pause_seconds, clock)
        self._faults: Counter[Fault] = Counter()
        self._lock = Lock()

    @property
    def faults(self) -> dict[Fault, int]:
        """Number of requests that failed or were refused, for each reason.

        Requests for missing objects do not count.
        """
        with self._lock:
            return dict(self._faults)

    @property
    def reads_paused(self) -> bool:
        """Return whether reads are paused now, because several reads have failed."""
        return self._reads.is_open

    def reading(self) -> AbstractContextManager[BucketClient]:
        """Return a context manager that yields the client, for reads.

        If reads are paused after failures, entering the context raises `Unavailable`. If the ``with``
        statement ends with `Unavailable`, this counts as a failed read.
        """
        return self._guard(self._reads)

    def writing(self) -> AbstractContextManager[BucketClient]:
        """Return a context manager that yields the client, for writes.

        If writes are paused after failures, entering the context raises `Unavailable`. If the ``with``
        statement ends with `Unavailable`, this counts as a failed write.
        """
        return self._guard(self._writes)

    @contextmanager
    def _guard(self, breaker: CircuitBreaker) -> Iterator[BucketClient]:
        """Return a context manager that yields the client if a circuit breaker admits a request.

        When the ``with`` statement ends, the breaker records a failure if it ended with `Unavailable`, and a
        success otherwise.

        Args:
            breaker: circuit breaker for reads or for writes.

        Raises:
            Unavailable: the breaker refuses requests now.
        """
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
        """Count a failed request. Return whether this is the first failure for this reason."""
        with self._lock:
            self._faults[fault] += 1
            return self._faults[fault] == 1
