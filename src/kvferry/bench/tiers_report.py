"""The report of `kvferry bench tiers`, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from kvferry.bench.rounds import MoverRounds
from kvferry.bench.tier_cases import TierSpeed
from kvferry.bench.tiers import MeasuredTiers
from kvferry.units import format_bytes


def show(measured: MeasuredTiers, console: Console) -> None:
    """Print the results of `kvferry bench tiers` as tables that are at most 80 columns wide."""
    job, machine = measured.job, measured.machine
    console.print(
        f"[bold]{job.reading.cache.name}[/]: chunks of {measured.chunk_tokens} tokens, "
        f"{format_bytes(measured.chunk_bytes)}\n"
        f"{machine.cores} cores, {machine.cpu}; median and range of {job.repeats} interleaved rounds",
        highlight=False,
    )
    _show_speeds(measured.speeds, console)
    _show_notes(measured.speeds, console)


def as_json(measured: MeasuredTiers) -> dict[str, Any]:
    """Return the results of `kvferry bench tiers` as values that can be written as JSON.

    They contain the time of every round in seconds, the bytes of a round, the speeds and the ratios.
    """
    job = measured.job
    return {
        "geometry": job.reading.cache.name,
        "machine": asdict(measured.machine),
        **{name: getattr(job, name) for name in ("depths", "repeats")},
        "engines": [{"layout": side.layout, "block_tokens": side.block_tokens} for side in job.sides],
        "path": str(job.path),
        "object": job.url,
        **{name: getattr(measured, name) for name in ("chunk_tokens", "chunk_bytes")},
        "speeds": [_speed_json(speed) for speed in measured.speeds],
    }


def _show_speeds(speeds: Sequence[TierSpeed], console: Console) -> None:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for title in ("tier", "direction"):
        table.add_column(title, no_wrap=True)
    for title in ("depth", "GB/s", "limit", "ratio", "range", "target"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("limited by", no_wrap=True)
    for speed in speeds:
        table.add_row(*_speed_row(speed))
    console.print("\n[bold]Tiers[/]: speed, and that of the same bytes without kvferry", highlight=False)
    console.print(table)


def _speed_json(speed: TierSpeed) -> dict[str, Any]:
    return {
        **asdict(speed),
        "limit": speed.limit.name,
        "gigabytes_per_second": {
            series.name: asdict(series.gigabytes_per_second)
            for series in (speed.ours, *speed.limits, *speed.controls)
        },
        "ratio": asdict(speed.ratio),
        "reached": speed.reached,
    }


def _speed_row(speed: TierSpeed) -> list[str]:
    ratio, colour = speed.ratio, "green" if speed.reached else "red"
    return [
        speed.tier,
        speed.direction,
        str(speed.depth),
        _gigabytes(speed.ours),
        _gigabytes(speed.limit),
        f"[{colour}]{ratio.median:.2f}[/]",
        f"{ratio.low:.2f}-{ratio.high:.2f}",
        f"{speed.target:.1f}",
        speed.limit.name,
    ]


def _show_notes(speeds: Sequence[TierSpeed], console: Console) -> None:
    """Print a table of figures that help to explain the results, with one row per tier and direction.

    The first column of figures shows kvferry's speed at each larger depth, as a multiple of its speed at the
    smallest depth. The second column shows the speed of each method in `TierSpeed.controls` at the smallest
    depth, as a share of the speed of `TierSpeed.limit`.
    """
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for title in ("tier", "direction"):
        table.add_column(title, no_wrap=True)
    for title in ("gain over the least depth", "control, share of the limit"):
        table.add_column(title)
    kinds = dict.fromkeys((speed.tier, speed.direction) for speed in speeds)
    for kind in kinds:
        first, *rest = sorted((s for s in speeds if (s.tier, s.direction) == kind), key=lambda s: s.depth)
        gains = ", ".join(f"{one.depth}: {one.ours.speed_ratio(first.ours).median:.2f}x" for one in rest)
        why = ", ".join(f"{a.name}: {a.speed_ratio(first.limit).median:.2f}" for a in first.controls)
        table.add_row(*kind, gains, why)
    console.print()
    console.print(table)


def _gigabytes(series: MoverRounds) -> str:
    return f"{series.gigabytes_per_second.median:.2f}"
