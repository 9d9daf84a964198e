"""What processes compete for and threads hand on: the lock of a file, say.

Getting it takes several system calls, and a while if another process has it. So of the threads of a process
one gets it, and who is done with it hands it on to one that waits. Before long it is given back all the same,
and left alone for a moment in which another process can get it.
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

_KEPT_SECONDS = 0.020
# Longer than other processes pause between two looks.
_LEFT_SECONDS = 0.002


class LockTimeout(Exception):
    """Others had it for too long."""


@dataclass
class _WaitingThreads(Generic[T]):
    """The threads of one process.

    Attributes:
        pid: the process.
        changed: told when it may be had.
        waiting: threads that wait for it.
        busy: a thread has it, or is getting it.
        thing: it, while this process has it.
        since: when it was got, by the clock.
        leave: whether other processes come first now.
    """

    pid: int
    changed: Condition = field(default_factory=Condition)
    waiting: int = 0
    busy: bool = False
    thing: T | None = None
    since: float = 0.0
    leave: bool = False


class LockHandoff(Generic[T]):
    """One thing, had by one thread of this process at a time. Any thread may use it.

        gone ─get─▶ had ─another waits─▶ kept ─▶ had ─nobody waits, or for long enough─▶ gone

    Args:
        name: what it is, for messages.
        get: gets it, until a time of the clock; raises `LockTimeout` or something else if it cannot.
        give: gives it back.
        clock: monotonic seconds.
        sleep: waits that many seconds.
    """

    def __init__(
        self,
        name: str,
        get: Callable[[float], T],
        give: Callable[[T], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._name = name
        self._get = get
        self._give = give
        self._clock = clock
        self._sleep = sleep
        self._own = _WaitingThreads[T](os.getpid())

    @contextmanager
    def held(self, seconds: float) -> Iterator[T]:
        """Have it, if it can be had within so many seconds.

        Raises:
            Busy: it cannot.
        """
        deadline = self._clock() + seconds
        queue = self._queue()
        self._enter(queue, seconds)
        sound = False
        try:
            if queue.thing is None:
                if queue.leave:
                    self._sleep(_LEFT_SECONDS)
                queue.thing = self._get(deadline)
                queue.since = self._clock()
            yield queue.thing
            sound = True
        finally:
            self._leave(queue, sound=sound)

    def _queue(self) -> _WaitingThreads[T]:
        """That of this process; a forked one inherits what threads of its parent did just then."""
        if self._own.pid != os.getpid():
            inherited, self._own = self._own, _WaitingThreads[T](os.getpid())
            if inherited.thing is not None:
                self._give(inherited.thing)
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

    def _leave(self, queue: _WaitingThreads[T], *, sound: bool) -> None:
        with queue.changed:
            long = self._clock() - queue.since > _KEPT_SECONDS
            queue.leave = long and queue.waiting > 0
            thing = queue.thing
            try:
                if thing is not None and (long or not sound or not queue.waiting):
                    queue.thing = None
                    self._give(thing)
            finally:
                queue.busy = False
                queue.changed.notify()
