"""Read traces for `kvferry replay` and `kvferry plan`, with progress bars, and compute hit-rate curves."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING

from kvferry.common.errors import ConfigError
from kvferry.common.machine import usable_cores
from kvferry.common.units import counted

if TYPE_CHECKING:
    from kvferry.tools.replay.curve import CurvePoint
    from kvferry.tools.replay.passes import OnProgress, Passes, Progress as PassProgress
    from kvferry.tools.replay.settings import BlockPool, ServedModel
    from kvferry.tools.replay.trace.base import Trace


def open_for_curve(path: str, unit_tokens: int | None, asked_by: str) -> Trace:
    """Open a trace from which a hit-rate curve is computed, in several passes.

    Raises:
        ConfigError: the file is no trace, it can be read only once, or it has only lengths.
    """
    from kvferry.tools.replay.trace.base import ONLY_LENGTHS
    from kvferry.tools.replay.trace.open import open_trace

    opened = open_trace(path, unit_tokens)
    # A pipe has no length.
    if opened.length is None:
        raise ConfigError(f"{asked_by} needs several passes, but {path} can be read only once; name a file")
    if not opened.tells_prefixes:
        instead = "or describe a workload, such as users=500,turns=6"
        raise ConfigError(f"{asked_by}: {opened.name} {ONLY_LENGTHS}, {instead}")
    return opened


def print_notes(trace: Trace) -> None:
    """Print on standard error what reading a trace changed or assumed."""
    for note in trace.notes():
        print(f"kvferry: {trace.name}: {note}", file=sys.stderr)


@contextmanager
def passes_over(trace: Trace, path: str, unit_tokens: int | None) -> Iterator[Passes]:
    """Yield the passes over a trace, with a bar for each if standard error is a terminal.

    Args:
        path: what `open_trace` gets to open the trace again.
        unit_tokens: the same.
    """
    from kvferry.tools.replay.passes import Passes
    from kvferry.tools.replay.trace.open import open_trace

    with (
        _bars(trace.length) as on_progress,
        Passes(
            trace, partial(open_trace, path, unit_tokens), len(usable_cores()) or 1, on_progress
        ) as passes,
    ):
        yield passes


@contextmanager
def _bars(length: float | None) -> Iterator[OnProgress]:
    """Show the progress of passes over a trace on standard error, if it is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    # Here, because rich takes long to import, and `replay` may run without a terminal.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[read]:,} read")
    tasks: dict[int, TaskID] = {}
    lock = Lock()
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bars:

        def show(found: PassProgress) -> None:
            with lock:
                if found.number not in tasks:
                    tasks[found.number] = bars.add_task(found.name, total=length, read=0)
                bars.update(tasks[found.number], completed=found.position, read=found.read)
                if found.has_ended:
                    bars.refresh()  # short passes are seen too
                    bars.remove_task(tasks[found.number])

        yield show


def curve_of_model(
    passes: Passes, model: ServedModel, kv_cache_memory: str | None
) -> tuple[list[CurvePoint], str]:
    """Replay a trace on one engine with unlimited host memory, then compute the hit rate by capacity.

    `kv_cache_memory` is that of each rank, such as ``40GiB``; None for a default. The second result says in
    sentences what the curve was computed from.
    """
    from kvferry.tools.replay.curve import hit_rate_curve
    from kvferry.tools.replay.settings import ReplaySettings, block_pool, parse_tier

    pool = block_pool(model, None, None, kv_cache_memory)
    settings = ReplaySettings(tiers=(parse_tier("host=unlimited"),), pool=pool)
    replayed = passes.run("unlimited memory", model, settings)
    results = replayed.results
    about = (
        f"Replayed: {counted(results.requests, 'request')} of {passes.trace.name}. {described(model, pool)} "
        f"Without host memory, the hit rate is {results.local_hit_rate:.1%}."
    )
    return hit_rate_curve(passes, replayed), about


def described(model: ServedModel, pool: BlockPool) -> str:
    """Return sentences about the engine and the settings of a curve."""
    found = (
        f"One engine {pool.text} stores chunks of {counted(model.chunk_tokens, 'token')} in host memory. A "
        "capacity is that of all its ranks together."
    )
    # Settings of windows and snapshots say nothing about models with full attention alone.
    if len(model.attention) < len(model.groups):
        steps = model.form.steps
        found += (
            f" Windows and snapshots are kept at least {counted(model.form.snapshot_tokens, 'token')} apart, "
            f"with a retention of {steps.retention} and {counted(steps.step_tokens, 'token')} per step."
        )
    return found
