"""The report of `benchmarks overhead`, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.overhead.measure import MeasuredOverhead
from benchmarks.overhead.readiness import Readiness
from benchmarks.phrases import verdict
from kvferry.tools.measuring.rounds import Spread

TARGET_PLANNING_SECONDS = 5e-3
TARGET_READY_SECONDS = 0.2


def show(measured: MeasuredOverhead, console: Console) -> None:
    """Print the results of all parts with at most 80 columns."""
    machine = measured.machine
    transports = "not set" if machine.transports is None else machine.transports
    console.print(
        f"[bold]{measured.job.reading.cache.name}[/]\n{machine.cores} cores, {machine.cpu}, "
        f"UCX_TLS {transports}; median and range of {measured.job.repeats} rounds\n",
        highlight=False,
    )
    _show_planning(measured, console)
    _show_readiness(measured.readiness, console)
    _show_hooks(measured, console)


def as_json(measured: MeasuredOverhead) -> dict[str, Any]:
    """Return all figures in seconds and tokens, as values for JSON."""
    job = measured.job
    return {
        "geometry": job.reading.cache.name,
        **{name: getattr(job, name) for name in ("planned_tokens", "moved_tokens", "repeats", "transports")},
        **{name: asdict(getattr(measured, name)) for name in ("machine", "planning", "making", "hooks")},
        "readiness": [asdict(each) for each in measured.readiness],
    }


def _show_planning(measured: MeasuredOverhead, console: Console) -> None:
    plan = measured.planning
    console.print(
        f"[bold]Planning[/] {plan.tokens:,} tokens, {plan.pages:,} pages, both sides scattered",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    good = verdict(reached=plan.ours.median < TARGET_PLANNING_SECONDS)
    table.add_row(
        "our arithmetic", _spread_ms(plan.ours), f"target under {_ms(TARGET_PLANNING_SECONDS)}: {good}"
    )
    table.add_row("  block tables to arrays", _spread_ms(plan.tables), "in the hook")
    table.add_row("  plan", _spread_ms(plan.plan), "in every lane")
    table.add_row("NIXL makes the transfer", _spread_ms(measured.making), "in every lane")
    console.print(table)


def _show_readiness(found: Sequence[Readiness], console: Console) -> None:
    """Print the times to prepare for a peer, for all measured models and parallel sizes."""
    good = verdict(reached=all(each.seconds.high < TARGET_READY_SECONDS for each in found))
    console.print(
        f"\n[bold]Getting ready[/] for a peer of other blocks (target {_ms(TARGET_READY_SECONDS)}): {good}",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False, show_header=False)
    for justify in ("left", "left", "right"):
        table.add_column(justify=justify, no_wrap=True)
    for each in found:
        (src, dst), (theirs, ours) = each.parallel, each.blocks
        table.add_row(f"{each.model} {src}→{dst}", f"{theirs:,} to {ours:,}", _spread_ms(each.seconds))
    console.print(table)


def _show_hooks(measured: MeasuredOverhead, console: Console) -> None:
    times = measured.hooks
    console.print(
        f"\n[bold]Inside hooks[/] per step, {times.in_flight} requests of {times.tokens:,} tokens under way, "
        f"{times.steps:,} steps, {times.loads:,} loads:\n"
        f"median {_us(times.median)}, p99 {_us(times.p99)}, longest {_us(times.longest)}",
        highlight=False,
    )


def _spread_ms(spread: Spread) -> str:
    return f"{spread.median * 1e3:.2f} ms ({spread.low * 1e3:.2f}-{spread.high * 1e3:.2f})"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} µs"
