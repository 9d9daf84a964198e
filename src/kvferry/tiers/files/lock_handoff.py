"""A file lock that processes compete for, and that the threads of one process hand to one another.

Taking the lock costs several system calls, and a wait if another process has it. So one thread of a process
takes the lock, and hands it to the next waiting thread. After 20 ms the process releases the lock. If more
threads wait, they pause so that another process can take it.
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
    """The state of a lock in one process, whose threads wait for the lock and hand it to one another.

    Attributes:
        pid: id of the process.
        changed: condition that is notified when a thread has finished with the lock.
        waiting: number of waiting threads.
        busy: whether a thread holds the lock or is taking it.
        resource: locked resource; None while this process does not have the lock.
        since: monotonic seconds at which this process took the lock.
        must_pause: whether this process must pause before it takes the lock again, so that another process
            can take the lock first.
    """

    pid: int
    changed: Condition = field(default_factory=Condition)
    waiting: int = 0
    busy: bool = False
    resource: T | None = None
    since: float = 0.0
    must_pause: bool = False


class LockHandoff(Generic[T]):
    """A lock that excludes other processes and threads. Threads of one process can hand it to one another.

    Taking over the lock from another process is slow. So a thread that is done hands the lock to a waiting
    thread of the same process. After 20 ms, the process releases the lock, so that other processes can take
    it. Any thread may use the object.

        free ─acquire─▶ used ─another thread waits─▶ handed over ─▶ used
        used ─no thread waits, or after 20 ms─▶ free

    Args:
        name: name of the locked resource, for messages.
        acquire: function that takes the lock and returns the resource. Its argument is a deadline, in seconds
            of `clock`. The function raises `LockTimeout` or another error if it fails.
        release: function that releases the lock of a resource.
        clock: function that returns monotonic seconds.
        sleep: function that waits a number of seconds.
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
        """Return a context manager that locks the resource and gives it to this thread.

        Entering the context waits at most `seconds` for other threads and processes.

        Raises:
            LockTimeout: other threads or processes held the resource for that long.
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
        """Return the state of the lock in this process.

        After a fork, the first call in the child creates a new state, and closes the child's copy of the
        resource, if it has inherited one.
        """
        if self._own.pid != os.getpid():
            inherited, self._own = self._own, _WaitingThreads[T](os.getpid())
            if inherited.resource is not None:
                self._release(inherited.resource)
        return self._own

    def _enter(self, queue: _WaitingThreads[T], seconds: float) -> None:
        """Wait until no other thread of this process uses the resource, and mark it as used by this thread.

        Args:
            queue: state of the lock in this process.
            seconds: maximum time to wait.

        Raises:
            LockTimeout: other threads used the resource for that long.
        """
        with queue.changed:
            queue.waiting += 1
            try:
                if not queue.changed.wait_for(lambda: not queue.busy, seconds):
                    raise LockTimeout(f"{self._name} was held by this process for {seconds:g} s")
                queue.busy = True
            finally:
                queue.waiting -= 1

    def _leave(self, queue: _WaitingThreads[T], *, succeeded: bool) -> None:
        """Hand the resource to the next waiting thread, or release it so that other processes can lock it.

        Args:
            queue: state of the lock in this process.
            succeeded: whether the use of the resource ended without an exception; if False, release the
                resource.
        """
        with queue.changed:
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
