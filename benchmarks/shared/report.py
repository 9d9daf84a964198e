"""The report of `benchmarks shared`, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.shared.measure import COMPARED, MeasuredSharing
from kvferry.common.units import format_bytes
from kvferry.planning.strategy import Strategy
from kvferry.tools.measuring.rounds import Spread


def show(found: MeasuredSharing, console: Console) -> None:
    """Print the speeds with at most 80 columns."""
    machine, rounds = found.machine, len(found.layouts[0].seconds[Strategy.DIRECT])
    console.print(
        f"{machine.cores} cores, {machine.cpu}, UCX_TLS {machine.transports}\n"
        f"{format_bytes(found.bytes)} between two processes; median and range of {rounds} rounds"
    )
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("from layout", "strategy", "GB/s", "range", "of direct", "range", ""):
        table.add_column(name, justify="left" if name in ("from layout", "strategy", "") else "right")
    for one in found.layouts:
        for strategy in COMPARED:
            speed = Spread.of([found.bytes / seconds / 1e9 for seconds in one.seconds[strategy]])
            ratio = one.ratio(strategy)
            table.add_row(
                one.layout,
                strategy,
                f"{speed.median:.2f}",
                f"{speed.low:.2f}-{speed.high:.2f}",
                f"{ratio.median:.1f}",
                f"{ratio.low:.1f}-{ratio.high:.1f}",
                "chosen" if strategy in one.chosen.split("+") else "",
            )
    console.print(table)
    for one in found.layouts:
        speed_text = f"{one.read_bytes_per_second / 1e9:.2g} GB/s"
        console.print(f"READs from {one.layout}, as measured at first contact: {speed_text}")


def as_json(found: MeasuredSharing) -> dict[str, Any]:
    """Return all rounds in seconds, with the size of a load and the machine, as values for JSON."""
    return asdict(found)
