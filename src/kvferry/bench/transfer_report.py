"""The report of `kvferry bench transfer`, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from kvferry.bench.rounds import MoverRounds, TransferComparison
from kvferry.bench.transfer import MeasuredTransfer
from kvferry.measuring.spread import Spread
from kvferry.units import format_bytes

SAME_DESCRIPTORS = 1
"""Index in `TransferComparison.others` of raw NIXL with the same descriptors as kvferry."""
TARGET_RATIO = 0.9


def show(measured: MeasuredTransfer, console: Console) -> None:
    """Print the results of `kvferry bench transfer` as a table that is at most 80 columns wide."""
    _show_job(measured, console)
    _show_comparison(measured.comparison, console)


def as_json(measured: MeasuredTransfer) -> dict[str, Any]:
    """Return the results of `kvferry bench transfer` as values that can be written as JSON.

    They contain the time of every round in seconds, the bytes of a round, the speeds and the ratios.
    """
    comparison, job = measured.comparison, measured.job
    whole = {
        "geometry": job.reading.cache.name,
        **{name: getattr(job, name) for name in ("tokens", "order", "repeats", "transports")},
        **{name: getattr(measured, name) for name in ("blocks", "layers", "page_bytes")},
        **{name: asdict(getattr(measured, name)) for name in ("machine", "comparison")},
    }
    whole["gigabytes_per_second"] = {
        series.name: asdict(series.gigabytes_per_second) for series in (comparison.ferry, *comparison.others)
    }
    whole["kvferry_as_multiple_of"] = {
        series.name: asdict(comparison.ferry.speed_ratio(series)) for series in comparison.others
    }
    return whole


def _show_job(measured: MeasuredTransfer, console: Console) -> None:
    job, machine, pages = measured.job, measured.machine, measured.blocks * measured.layers
    console.print(
        f"[bold]{job.reading.cache.name}[/]: {job.tokens:,} tokens in {measured.blocks:,} {job.order} blocks "
        f"x {measured.layers} layers = {pages:,} pages of {format_bytes(measured.page_bytes)}, "
        f"{format_bytes(pages * measured.page_bytes)}",
        highlight=False,
    )
    transports = "not set" if machine.transports is None else machine.transports
    console.print(
        f"{machine.cores} cores, {machine.cpu}, UCX_TLS {transports}; two processes; "
        f"median and range of {job.repeats} interleaved rounds",
        highlight=False,
    )


def _show_comparison(comparison: TransferComparison, console: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("moved by", no_wrap=True)
    for title in ("GB/s", "range", "ms", "ratio", "range"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_row(*_series(comparison.ferry), "", "")
    for series in comparison.others:
        table.add_row(*_series(series), *_ratio(comparison.ferry.speed_ratio(series)))
    console.print()
    console.print(table)
    reached = comparison.ferry.speed_ratio(comparison.others[SAME_DESCRIPTORS]).median
    planning, reading, check, rest = comparison.stages
    console.print(
        f"\nkvferry at {reached:.2f} of raw NIXL with the same descriptors "
        f"(target {TARGET_RATIO}): {_verdict(reached >= TARGET_RATIO)}\n"
        f"its time: planning {_ms(planning)}, reading {_ms(reading)}, lease check {_ms(check)}, "
        f"hand-over and acknowledgement {_ms(rest)}",
        highlight=False,
    )


def _series(series: MoverRounds) -> tuple[str, str, str, str]:
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


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
