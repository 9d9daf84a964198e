"""A bucket that may be ill: what fails is counted, said once, and left alone for a while."""

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
    """The way of a tier to its bucket. Any thread may use it.

    Reads and writes are left alone each by themselves: a store may allow, or manage, only one of them.

    Args:
        bucket: where requests go.
        pause_seconds: how long it is left alone after failures.
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
        """Requests that came to nothing because of the store, by reason."""
        with self._lock:
            return dict(self._faults)

    @property
    def reads_paused(self) -> bool:
        """Whether reads are left alone now."""
        return self._reads.is_open

    def reading(self) -> AbstractContextManager[BucketClient]:
        """Use the bucket for reading. Raises `Unavailable` where it is left alone."""
        return self._through(self._reads)

    def writing(self) -> AbstractContextManager[BucketClient]:
        """Use the bucket for writing. Raises `Unavailable` where it is left alone."""
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
        """Count a fault; says whether it is the first of its kind."""
        with self._lock:
            self._faults[fault] += 1
            return self._faults[fault] == 1
