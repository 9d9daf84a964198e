"""The report of `benchmarks eviction`, as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.eviction.measure import Cell
from kvferry.common.units import format_bytes
from kvferry.tools.measuring.rounds import Spread
from kvferry.tools.report import Column, Report

# A policy is as good as the best one if it saves at least this share of what that one saves.
_AS_GOOD = 0.98


def show(found: Sequence[Cell], report: Report) -> None:
    """Print a table of all cells, and in how many of them each policy is as good as the best one."""
    report.text("Computation saved, as a share of the bound:")
    names = list(found[0].saved)
    report.table(
        [
            Column("trace", left=True),
            Column("model", left=True),
            Column("capacity"),
            Column("bound"),
            Column("offline"),
            *map(Column, names),
        ],
        [
            [
                cell.trace,
                cell.model,
                format_bytes(cell.capacity_bytes),
                f"{cell.unlimited * cell.bound:.1%}",
                f"{cell.offline:.1%}",
                *(f"{cell.saved[name]:.1%}" for name in names),
            ]
            for cell in found
        ],
    )
    report.text(
        "The bound is a share of the computation of all prompts. Offline is a schedule with knowledge of the "
        "future."
    )
    for name in names:
        good = sum(cell.saved[name] >= _AS_GOOD * max(cell.saved.values()) for cell in found)
        report.text(f"{name}: within 2% of the best policy in {good} of {len(found)} cells")


def show_speed(times: Mapping[str, Spread], report: Report) -> None:
    """Print the time of evictions."""
    report.text("CPU time for each chunk that is stored, marked as used and evicted:")
    report.table(
        [Column("policy and capacity", left=True), Column("median"), Column("range")],
        [
            [name, f"{one.median * 1e6:.1f} µs", f"{one.low * 1e6:.1f} to {one.high * 1e6:.1f}"]
            for name, one in times.items()
        ],
    )


def as_json(found: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return all cells as values for JSON."""
    return [asdict(cell) for cell in found]
