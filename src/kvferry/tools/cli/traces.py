"""Read traces for `kvferry replay` and `kvferry plan`, with a progress bar, and compute hit-rate curves."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from kvferry.common.errors import ConfigError
from kvferry.common.units import counted

if TYPE_CHECKING:
    from kvferry.tools.replay.curve import CurvePoint
    from kvferry.tools.replay.settings import BlockPool, ServedModel
    from kvferry.tools.replay.trace.base import Trace, TraceRequest

# Requests between two updates of the bar.
_EVERY = 256


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


def progress(trace: Trace, what: str) -> Iterator[TraceRequest]:
    """Yield what a trace yields, with a bar named `what` if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield from trace
        return
    # Here, because rich takes long to import, and `replay` may run without a terminal.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[read]:,} read")
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=trace.length, read=0)
        for number, request in enumerate(trace):
            if number % _EVERY == 0:
                bar.update(task, completed=trace.position(), read=number)
            yield request


def curve_of_model(
    trace: Trace, model: ServedModel, kv_cache_memory: str | None
) -> tuple[list[CurvePoint], str]:
    """Replay a trace on one engine with unlimited host memory, then compute the hit rate by capacity.

    `kv_cache_memory` is that of each rank, such as ``40GiB``; None for a default. The second result says in
    sentences what the curve was computed from.
    """
    from kvferry.tools.replay.curve import hit_rate_curve
    from kvferry.tools.replay.settings import ReplaySettings, block_pool, parse_tier
    from kvferry.tools.replay.simulation import Simulation

    pool = block_pool(model, None, None, kv_cache_memory)
    settings = ReplaySettings(tiers=(parse_tier("host=unlimited"),), pool=pool)
    simulation = Simulation(model, settings, trace.unit_tokens)
    results = simulation.run(progress(trace, "unlimited memory"))
    about = (
        f"Replayed: {counted(results.requests, 'request')} of {trace.name}. {described(model, pool)} "
        f"Without host memory, the hit rate is {results.local_hit_rate:.1%}."
    )
    return hit_rate_curve(partial(progress, trace), simulation), about


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
