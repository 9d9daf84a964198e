"""Threads that may run on any core of the process, wherever the thread that starts them is bound.

Engines on CPUs bind the threads that compute, each to a core, and a new thread inherits that from the thread
that starts it. So reads and copies would share one core with the computation.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from kvferry.common.machine import usable_cores


class Thread(threading.Thread):
    """A daemon thread that may run on any core of the process."""

    def __init__(self, run: Callable[[], object], name: str) -> None:
        super().__init__(target=run, name=name, daemon=True)

    def run(self) -> None:
        _bind(usable_cores())
        super().run()


@contextmanager
def on_any_core() -> Iterator[None]:
    """Let this thread run on any core of the process meanwhile, and so the threads that libraries start."""
    cores = usable_cores()
    before = os.sched_getaffinity(0) if cores else set[int]()
    _bind(cores)
    try:
        yield
    finally:
        _bind(before)


def _bind(cores: set[int]) -> None:
    if cores:
        # The cores of a container may change meanwhile.
        with suppress(OSError):
            os.sched_setaffinity(0, cores)
