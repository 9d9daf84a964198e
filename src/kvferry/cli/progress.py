"""A progress bar on standard error while a command reads a trace or makes one up."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.replay.trace.base import Trace
    from kvferry.replay.trace.request import TraceRequest

_EVERY = 256
"""Number of requests between two updates of the bar."""


def progress(trace: Trace, what: str) -> Iterator[TraceRequest]:
    """Yield the requests of a trace, and show how far it is read if standard error is a terminal.

    Args:
        trace: trace to read.
        what: name of the task, for the bar.
    """
    if not sys.stderr.isatty():
        yield from trace
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[requests]:,} requests")
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=trace.length, requests=0)
        for number, request in enumerate(trace):
            if number % _EVERY == 0:
                bar.update(task, completed=trace.position(), requests=number)
            yield request
