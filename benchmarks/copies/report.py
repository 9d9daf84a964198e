"""The report of `benchmarks copies`, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.copies.measure import CopyTimes


def show(found: Sequence[CopyTimes], console: Console) -> None:
    """Print the speeds with at most 80 columns."""
    rounds = len(found[0].seconds["kernel"])
    console.print(f"one thread, scattered blocks; GB/s; median and range of {rounds} interleaved rounds")
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("copy", "direction", "numpy", "kernel", "memcpy", "of memcpy", "of numpy"):
        table.add_column(name, justify="left" if name in ("copy", "direction") else "right", no_wrap=True)
    for one in found:
        ratio, gain = one.ratio("memcpy"), one.ratio("numpy")
        table.add_row(
            one.case.name,
            "gather" if one.storing else "scatter",
            *(f"{one.speed(by) / 1e9:.2f}" for by in ("numpy", "kernel", "memcpy")),
            f"{ratio.median:.2f} {ratio.low:.2f}-{ratio.high:.2f}",
            f"{gain.median:.1f}",
        )
    console.print(table)


def as_json(found: Sequence[CopyTimes]) -> dict[str, Any]:
    """Return all rounds in seconds, with the bytes of each copy, as values for JSON."""
    return {"copies": [asdict(one) for one in found]}
