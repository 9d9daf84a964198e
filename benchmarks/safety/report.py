"""The report of `benchmarks safety`, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.safety.cost import ProtectionCost
from benchmarks.safety.measure import MeasuredSafety
from kvferry.common.units import format_seconds
from kvferry.tools.measuring.rounds import Spread


def show(measured: MeasuredSafety, console: Console) -> None:
    """Print the costs as a table with at most 80 columns."""
    job, machine = measured.job, measured.machine
    console.print(
        f"[bold]Protections[/]: {job.reading.cache.name}, {job.tokens:,} tokens, {job.repeats} rounds; "
        f"{machine.cores} cores, {machine.cpu}",
        highlight=False,
    )
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("part")
    table.add_column("work")
    for title in ("with", "without", "adds", "share", "range", "target"):
        table.add_column(title, justify="right", no_wrap=True)
    for cost in measured.costs:
        table.add_row(*_row(cost))
    console.print(table)


def as_json(measured: MeasuredSafety) -> dict[str, Any]:
    """Return all rounds in seconds, and the derived figures, as values for JSON."""
    job = measured.job
    return {
        "geometry": job.reading.cache.name,
        "tokens": job.tokens,
        "repeats": job.repeats,
        "machine": asdict(measured.machine),
        "costs": [
            {
                **asdict(cost),
                "extra": asdict(cost.extra),
                "share": asdict(cost.share),
                "reached": cost.reached,
            }
            for cost in measured.costs
        ],
    }


def _row(cost: ProtectionCost) -> list[str]:
    share, colour = cost.share, "green" if cost.reached else "red"
    median = f"{share.median:.2%}"
    return [
        cost.part,
        cost.work,
        format_seconds(Spread.of(cost.on).median),
        format_seconds(Spread.of(cost.off).median),
        _difference(cost.extra.median),
        median if cost.target is None else f"[{colour}]{median}[/]",
        f"{share.low:.1%} to {share.high:.1%}",
        "" if cost.target is None else f"{cost.target:.0%}",
    ]


def _difference(seconds: float) -> str:
    """Format a difference of times in seconds. It may be negative if the machine was busy in a round.

    >>> _difference(1e-3), _difference(-1e-3)
    ('1 ms', '-1 ms')
    """
    return format_seconds(seconds) if seconds >= 0 else f"-{format_seconds(-seconds)}"
