"""The speed of every tier, for people and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from kvferry.bench.contest import Speed
from kvferry.bench.rounds import Series


def show(speeds: Sequence[Speed], console: Console) -> None:
    """Print it; fits 80 columns."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for title in ("tier", "way"):
        table.add_column(title, no_wrap=True)
    for title in ("depth", "GB/s", "limit", "ratio", "range", "target"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("the limit", no_wrap=True)
    for speed in speeds:
        table.add_row(*_speed_row(speed))
    console.print("\n[bold]Tiers[/]: speed, and that of the same bytes without us", highlight=False)
    console.print(table)
    _show_notes(speeds, console)


def as_json(speed: Speed) -> dict[str, Any]:
    """All rounds, in seconds and bytes, with what is derived beside them."""
    return {
        **asdict(speed),
        "limit": speed.limit.name,
        "gigabytes_per_second": {
            series.name: asdict(series.gigabytes_per_second)
            for series in (speed.ours, *speed.limits, *speed.asides)
        },
        "ratio": asdict(speed.ratio),
        "reached": speed.reached,
    }


def _speed_row(speed: Speed) -> list[str]:
    ratio, colour = speed.ratio, "green" if speed.reached else "red"
    return [
        speed.tier,
        speed.way,
        str(speed.depth),
        _gigabytes(speed.ours),
        _gigabytes(speed.limit),
        f"[{colour}]{ratio.median:.2f}[/]",
        f"{ratio.low:.2f}-{ratio.high:.2f}",
        f"{speed.target:.1f}",
        speed.limit.name,
    ]


def _show_notes(speeds: Sequence[Speed], console: Console) -> None:
    """What explains a result, and what depth brings, per tier and way."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for title in ("tier", "way"):
        table.add_column(title, no_wrap=True)
    for title in ("beside the least depth", "what explains it, of the limit"):
        table.add_column(title)
    kinds = dict.fromkeys((speed.tier, speed.way) for speed in speeds)
    for kind in kinds:
        first, *rest = sorted((s for s in speeds if (s.tier, s.way) == kind), key=lambda s: s.depth)
        gains = ", ".join(f"{one.depth}: {one.ours.times(first.ours).median:.2f}x" for one in rest)
        why = ", ".join(f"{a.name}: {a.times(first.limit).median:.2f}" for a in first.asides)
        table.add_row(*kind, gains, why)
    console.print()
    console.print(table)


def _gigabytes(series: Series) -> str:
    return f"{series.gigabytes_per_second.median:.2f}"
