"""The report of `benchmarks layout`, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.layout.cells import CHOSEN, READS, LayoutRow, LayoutTable
from benchmarks.layout.verdicts import verdicts
from kvferry.common.units import format_bytes
from kvferry.tools.measuring.rounds import MachineFacts, Spread

_SHORT = ("direct", "over", "staged")
"""Headings of the columns of `READS`."""


def show(tables: Sequence[LayoutTable], machine: MachineFacts, repeats: int, console: Console) -> None:
    """Print the tables with at most 80 columns, and whether they reach the targets."""
    transports = "not set" if machine.transports is None else machine.transports
    console.print(
        f"{machine.cores} cores, {machine.cpu}, UCX_TLS {transports}; two processes; median of {repeats} "
        "interleaved rounds; scattered blocks; methods: direct, over-read, staged; run and count: size and "
        "number of direct's descriptors; plan: milliseconds",
        highlight=False,
    )
    for table in tables:
        _show_table(table, console)
    console.print()
    for verdict in verdicts(tables):
        said = "[green]reached[/]" if verdict.reached else f"[red]missed by {len(verdict.missed)}[/]"
        console.print(f"{verdict.target}: {said} of {verdict.cells}", highlight=False)
        for missed in verdict.missed:
            console.print(f"  {missed}", highlight=False)


def as_json(tables: Sequence[LayoutTable], machine: MachineFacts) -> dict[str, Any]:
    """Return all rounds in seconds and bytes, and the results for all targets, as values for JSON."""
    return {
        "machine": asdict(machine),
        "tables": [_table_json(table) for table in tables],
        "verdicts": [{**asdict(verdict), "reached": verdict.reached} for verdict in verdicts(tables)],
    }


def _table_json(table: LayoutTable) -> dict[str, Any]:
    return {
        "model": table.model,
        "tokens": table.tokens,
        "raw_gigabytes_per_second": table.raw,
        "left_out": dict(table.left_out),
        "cells": [
            {
                **asdict(row.cell),
                "run_bytes": asdict(row.runs),
                "descriptors": row.descriptors,
                "chosen": row.strategy,
                "ways": {
                    str(way): {"bytes": s.bytes, "seconds": s.seconds, "of_raw": row.ratios[way]}
                    for way, s in row.ways.items()
                },
                "planning": asdict(row.planning),
            }
            for row in table.rows
        ],
    }


def _show_table(table: LayoutTable, console: Console) -> None:
    speed = Spread.of(table.raw)
    sizes = sorted({row.ways[CHOSEN].bytes for row in table.rows}, reverse=True)
    console.print(
        f"\n[bold]{table.model}[/]: {table.tokens:,} tokens, {' or '.join(map(format_bytes, sizes))} to "
        "one rank; "
        f"raw NIXL at 2 MiB: {speed.median:.2f} GB/s ({speed.low:.2f}-{speed.high:.2f}) = 1",
        highlight=False,
    )
    grid = RichTable(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for title in ("layout", "TP"):
        grid.add_column(title, no_wrap=True)
    for title in ("run", "count", *_SHORT, CHOSEN, "range"):
        grid.add_column(title, justify="right", no_wrap=True)
    grid.add_column("method", no_wrap=True)
    grid.add_column("plan", justify="right", no_wrap=True)
    for row in table.rows:
        grid.add_row(*_cells(row))
    console.print(grid)
    if table.left_out:
        cells = [cell for cell, _ in table.left_out]
        console.print(
            f"left out: {', '.join(cells)}; the first since {table.left_out[0][1]}", highlight=False
        )


def _cells(row: LayoutRow) -> list[str]:
    chosen = row.ratio(CHOSEN)
    return [
        row.cell.layout,
        f"{row.cell.src_tp}→{row.cell.dst_tp}",
        format_bytes(row.runs.both),
        str(row.descriptors),
        *(f"{row.ratio(way).median:.2f}" for way in READS),
        f"[bold]{chosen.median:.2f}[/]",
        f"{chosen.low:.2f}-{chosen.high:.2f}",
        "+".join(name[:2] for name in row.strategy.split("+")),
        f"{row.planning.ours.median * 1e3:.2f}",
    ]
