"""A progress bar on standard error while a command reads a trace or makes one up."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.replay.trace.base import Trace
    from kvferry.replay.trace.request import TraceRequest
    from kvferry.replay.workload import Workload

_EVERY = 256
"""Number of requests between two updates of the bar."""


def progress(trace: Trace, what: str) -> Iterator[TraceRequest]:
    """Return the requests of a trace, and show how much of its file is read.

    Args:
        trace: trace to read.
        what: name of the task, for the bar.
    """
    return _with_bar(trace, what, trace.size_bytes, lambda _: trace.position())


def workload_progress(workload: Workload, what: str) -> Iterator[TraceRequest]:
    """Return the requests of a described workload, and show how much of its time has passed.

    Args:
        workload: workload that makes the requests.
        what: name of the task, for the bar.
    """
    requests = workload.requests()
    return _with_bar(requests, what, workload.duration_seconds, lambda request: request.arrival)


def _with_bar(
    requests: Iterable[TraceRequest],
    what: str,
    total: float | None,
    completed: Callable[[TraceRequest], float],
) -> Iterator[TraceRequest]:
    """Yield requests, and show a bar if standard error is a terminal.

    Args:
        requests: requests to yield.
        what: name of the task.
        total: value of `completed` at the end; None if unknown.
        completed: returns how far the reading is at a request.
    """
    if not sys.stderr.isatty():
        yield from requests
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[requests]:,} requests")
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total, requests=0)
        for number, request in enumerate(requests):
            if number % _EVERY == 0:
                bar.update(task, completed=completed(request), requests=number)
            yield request
