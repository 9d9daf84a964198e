"""Access to a bucket that counts faults, logs the first of each kind, and pauses after several in a row."""

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

# In a row.
_FAILURES = 3


class GuardedBucket:
    """A bucket with one circuit breaker for reads and one for writes. Any thread may use it.

    Reads and writes pause separately, because a store may allow, or cope with, only one of them.

    Args:
        bucket: client that makes the requests.
        pause_seconds: length of a pause after failures.
        clock: monotonic seconds.
    """

    def __init__(self, bucket: BucketClient, pause_seconds: float, clock: Callable[[], float]) -> None:
        self._bucket = bucket
        self._reads = CircuitBreaker(_FAILURES, pause_seconds, clock)
        self._writes = CircuitBreaker(_FAILURES, pause_seconds, clock)
        self._faults: Counter[Fault] = Counter()
        self._lock = Lock()

    @property
    def faults(self) -> dict[Fault, int]:
        """The number of requests that failed because of the store, by reason."""
        with self._lock:
            return dict(self._faults)

    @property
    def reads_paused(self) -> bool:
        """Return whether reads are paused now."""
        return self._reads.is_open

    def reading(self) -> AbstractContextManager[BucketClient]:
        """Use the bucket for reading. Raises `Unavailable` while reads are paused."""
        return self._through(self._reads)

    def writing(self) -> AbstractContextManager[BucketClient]:
        """Use the bucket for writing. Raises `Unavailable` while writes are paused."""
        return self._through(self._writes)

    @contextmanager
    def _through(self, breaker: CircuitBreaker) -> Iterator[BucketClient]:
        ticket = breaker.enter()
        if ticket is None:
            self._count(Fault.PAUSED)
            raise Unavailable(Fault.PAUSED)
        worked = True
        try:
            yield self._bucket
        except Unavailable as error:
            worked = False
            if self._count(error.fault):
                # As text: whoever keeps the record would keep the memory that the request was about.
                _log.warning("object tier %s: %s; %s", self._bucket.url, str(error), error.fault.advice)
            raise
        finally:
            breaker.leave(ticket, worked=worked)

    def _count(self, fault: Fault) -> bool:
        """Count a fault; return whether it is the first of its kind."""
        with self._lock:
            self._faults[fault] += 1
            return self._faults[fault] == 1
