"""The report of `benchmarks scale`, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.scale.result import MeasuredCase, MeasuredSizes, figure_text
from kvferry.tools.measuring.rounds import Spread, machine_facts


def show(found: Sequence[MeasuredCase], rounds: int, console: Console) -> None:
    """Print one table per case with at most 80 columns."""
    console.print(
        f"figure per unit, and its ratio to the first column in the same round: median\n"
        f"and range of {rounds} rounds; memory and messages are measured once\n"
    )
    for case in found:
        console.print(_table(case))
        console.print()


def as_json(found: Sequence[MeasuredCase], rounds: int) -> dict[str, Any]:
    """Return all rounds in seconds and bytes per unit, and the ratios, as values for JSON."""
    return {
        "rounds": rounds,
        "machine": asdict(machine_facts()),
        "cases": [
            {
                "name": case.name,
                "noun": case.noun,
                "sizes": list(case.sizes),
                "measures": [_measure_json(one, len(case.sizes)) for one in case.measures],
            }
            for case in found
        ],
    }


def _measure_json(one: MeasuredSizes, sizes: int) -> dict[str, Any]:
    return {
        **asdict(one.measure),
        "values": [list(values) for values in one.values],
        "figures": [asdict(one.figure(size)) for size in range(sizes)],
        "ratios": [asdict(one.ratio(size)) for size in range(sizes)],
    }


def _table(case: MeasuredCase) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(f"number of {case.noun}", no_wrap=True, style=None)
    for size in case.sizes:
        table.add_column(f"{size:,}", justify="right", no_wrap=True)
    for one in case.measures:
        sizes = range(len(case.sizes))
        unit = one.measure.unit
        table.add_row(_title(one), *(figure_text(one.figure(size).median, unit) for size in sizes))
        table.add_row("  ratio", "", *(f"{one.ratio(size).median:.2f}" for size in sizes[1:]))
        if len(one.values[0]) > 1:
            table.add_row("  range of ratios", "", *(_range(one.ratio(size)) for size in sizes[1:]))
    return table


def _title(one: MeasuredSizes) -> str:
    return f"{one.measure.name}, per {one.measure.per}"


def _range(spread: Spread) -> str:
    return f"{spread.low:.2f}-{spread.high:.2f}"
