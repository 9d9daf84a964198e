"""A file lock that processes compete for, and that the threads of one process hand to one another.

Taking the lock costs several system calls, and a wait if another process has it. So a thread that is done
hands it to the next waiting thread. After 20 ms the process releases it for other processes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Condition
from typing import Generic, TypeVar

T = TypeVar("T")

_HOLD_SECONDS = 0.020
# Pause before a process takes the lock again. It is longer than the pause between two attempts to take it.
_PAUSE_SECONDS = 0.002


class LockTimeout(Exception):
    """Raised if other threads or processes held a lock until the time limit."""


@dataclass
class _WaitingThreads(Generic[T]):
    """The state of a lock in one process."""

    pid: int
    changed: Condition = field(default_factory=Condition)  # notified when a thread has finished with the lock
    waiting: int = 0  # number of waiting threads
    busy: bool = False  # whether a thread holds the lock or is taking it
    resource: T | None = None  # None while this process does not have the lock
    since: float = 0.0  # monotonic seconds at which this process took the lock
    must_pause: bool = False  # whether to pause before the next take, so that another process can be first


class LockHandoff(Generic[T]):
    """A lock that excludes other processes and threads. Any thread may use the object.

        free ─acquire─▶ used ─another thread waits─▶ handed over ─▶ used
        used ─no thread waits, or after 20 ms─▶ free

    Args:
        name: name of the locked resource, for messages.
        acquire: take the lock until a deadline in seconds of `clock`, and return the resource. It raises
            `LockTimeout` or another error if it fails.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        name: str,
        acquire: Callable[[float], T],
        release: Callable[[T], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._name = name
        self._acquire = acquire
        self._release = release
        self._clock = clock
        self._sleep = sleep
        self._own = _WaitingThreads[T](os.getpid())

    @property
    def waiting(self) -> int:
        """Number of threads of this process that wait for the lock."""
        return self._own.waiting

    @contextmanager
    def held(self, seconds: float) -> Iterator[T]:
        """Lock the resource for this thread.

        Raises:
            LockTimeout: other threads or processes held the resource for `seconds`.
        """
        deadline = self._clock() + seconds
        queue = self._queue()
        self._enter(queue, seconds)
        succeeded = False
        try:
            if queue.resource is None:
                if queue.must_pause:
                    self._sleep(_PAUSE_SECONDS)
                queue.resource = self._acquire(deadline)
                queue.since = self._clock()
            yield queue.resource
            succeeded = True
        finally:
            self._leave(queue, succeeded=succeeded)

    def _queue(self) -> _WaitingThreads[T]:
        """Return the state of the lock in this process, a new one after a fork."""
        if self._own.pid != os.getpid():
            # The child's copy of the descriptor keeps the parent's flock alive; the condition may be held for
            # good.
            inherited, self._own = self._own, _WaitingThreads[T](os.getpid())
            if inherited.resource is not None:
                self._release(inherited.resource)
        return self._own

    def _enter(self, queue: _WaitingThreads[T], seconds: float) -> None:
        with queue.changed:
            queue.waiting += 1
            try:
                if not queue.changed.wait_for(lambda: not queue.busy, seconds):
                    raise LockTimeout(f"{self._name} was held by this process for {seconds:g} s")
                queue.busy = True
            finally:
                queue.waiting -= 1

    def _leave(self, queue: _WaitingThreads[T], *, succeeded: bool) -> None:
        with queue.changed:
            # After an error the state of the resource is unknown. It is opened again for the next thread.
            long = self._clock() - queue.since > _HOLD_SECONDS
            queue.must_pause = long and queue.waiting > 0
            resource = queue.resource
            try:
                if resource is not None and (long or not succeeded or not queue.waiting):
                    queue.resource = None
                    self._release(resource)
            finally:
                queue.busy = False
                queue.changed.notify()
