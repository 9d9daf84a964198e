"""What was measured, for people and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from kvferry.bench.peers import Readiness
from kvferry.bench.rounds import Comparison, Series
from kvferry.bench.stats import Spread
from kvferry.bench.transfer import MeasuredTransfer
from kvferry.plan.units import size

SAME_DESCRIPTORS = 1
"""Which of `Comparison.others` reads the same descriptors."""
TARGET_RATIO = 0.9
TARGET_PLANNING_SECONDS = 5e-3
TARGET_READY_SECONDS = 0.2


def show(measured: MeasuredTransfer, console: Console) -> None:
    """Print it; fits 80 columns."""
    _show_job(measured, console)
    _show_comparison(measured.comparison, console)
    _show_planning(measured, console)
    _show_hooks(measured, console)


def as_json(measured: MeasuredTransfer) -> dict[str, Any]:
    """Everything, in seconds and bytes, with what is derived beside it."""
    comparison, job = measured.comparison, measured.job
    whole = {
        "geometry": job.reading.cache.name,
        **{name: getattr(job, name) for name in ("tokens", "order", "repeats", "transports")},
        **{name: getattr(measured, name) for name in ("blocks", "layers", "page_bytes")},
        **{
            name: asdict(getattr(measured, name))
            for name in ("machine", "comparison", "hooks", "planning", "making")
        },
        "readiness": [asdict(each) for each in measured.readiness],
    }
    whole["gigabytes_per_second"] = {
        series.name: asdict(series.gigabytes_per_second) for series in (comparison.ferry, *comparison.others)
    }
    whole["kvferry_as_multiple_of"] = {
        series.name: asdict(comparison.ferry.times(series)) for series in comparison.others
    }
    return whole


def _show_job(measured: MeasuredTransfer, console: Console) -> None:
    job, machine, pages = measured.job, measured.machine, measured.blocks * measured.layers
    console.print(
        f"[bold]{job.reading.cache.name}[/]: {job.tokens:,} tokens in {measured.blocks:,} {job.order} blocks "
        f"x {measured.layers} layers = {pages:,} pages of {size(measured.page_bytes)}, "
        f"{size(pages * measured.page_bytes)}",
        highlight=False,
    )
    transports = "not set" if machine.transports is None else machine.transports
    console.print(
        f"{machine.cores} cores, {machine.cpu}, UCX_TLS {transports}; two processes; "
        f"median and range of {job.repeats} interleaved rounds",
        highlight=False,
    )


def _show_comparison(comparison: Comparison, console: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("moved by", no_wrap=True)
    for title in ("GB/s", "range", "ms", "ratio", "range"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_row(*_series(comparison.ferry), "", "")
    for series in comparison.others:
        table.add_row(*_series(series), *_ratio(comparison.ferry.times(series)))
    console.print()
    console.print(table)
    reached = comparison.ferry.times(comparison.others[SAME_DESCRIPTORS]).median
    planning, reading, check, rest = comparison.stages
    console.print(
        f"\nkvferry at {reached:.2f} of raw NIXL with the same descriptors "
        f"(target {TARGET_RATIO}): {_verdict(reached >= TARGET_RATIO)}\n"
        f"its time: planning {_ms(planning)}, reading {_ms(reading)}, lease check {_ms(check)}, "
        f"hand-over and acknowledgement {_ms(rest)}\n",
        highlight=False,
    )


def _show_planning(measured: MeasuredTransfer, console: Console) -> None:
    plan = measured.planning
    console.print(
        f"[bold]Planning[/] {plan.tokens:,} tokens, {plan.pages:,} pages, both sides scattered",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    good = _verdict(plan.ours.median < TARGET_PLANNING_SECONDS)
    table.add_row(
        "our arithmetic", _spread_ms(plan.ours), f"target under {_ms(TARGET_PLANNING_SECONDS)}: {good}"
    )
    table.add_row("  block tables to arrays", _spread_ms(plan.tables), "in the hook")
    table.add_row("  plan", _spread_ms(plan.plan), "in every lane")
    table.add_row("NIXL makes the transfer", _spread_ms(measured.making), "in every lane")
    console.print(table)
    _show_readiness(measured.readiness, console)


def _show_readiness(found: Sequence[Readiness], console: Console) -> None:
    """How long it takes, of the models and sizes that are measured."""
    good = _verdict(all(each.seconds.high < TARGET_READY_SECONDS for each in found))
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


def _show_hooks(measured: MeasuredTransfer, console: Console) -> None:
    times = measured.hooks
    console.print(
        f"\n[bold]Inside hooks[/] per step, {times.in_flight} requests of {times.tokens:,} tokens under way, "
        f"{times.steps:,} steps, {times.loads:,} loads:\n"
        f"median {_us(times.median)}, p99 {_us(times.p99)}, longest {_us(times.longest)}",
        highlight=False,
    )


def _series(series: Series) -> tuple[str, str, str, str]:
    speed = series.gigabytes_per_second
    return (
        series.name,
        f"{speed.median:.2f}",
        f"{speed.low:.2f}-{speed.high:.2f}",
        f"{Spread.of(series.seconds).median * 1e3:.1f}",
    )


def _ratio(spread: Spread) -> tuple[str, str]:
    return f"{spread.median:.2f}", f"{spread.low:.2f}-{spread.high:.2f}"


def _verdict(good: bool) -> str:
    return "[green]reached[/]" if good else "[red]missed[/]"


def _spread_ms(spread: Spread) -> str:
    return f"{spread.median * 1e3:.2f} ms ({spread.low * 1e3:.2f}-{spread.high * 1e3:.2f})"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} µs"
