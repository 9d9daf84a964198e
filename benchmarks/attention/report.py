"""The report of `benchmarks attention`, as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.attention.measure import MEASURES, TOKEN_BYTES, AttentionJob, Found
from benchmarks.cpu_layouts import CPU_LAYOUTS, PER_LAYER
from kvferry.common.units import format_bytes
from kvferry.tools.measuring.rounds import Spread


def show(job: AttentionJob, found: Found, console: Console) -> None:
    """Print the times with at most 80 columns."""
    pages = " and ".join(format_bytes(TOKEN_BYTES * job.block_tokens / each) for each in (8, 1))
    console.print(f"decode step: {job.requests} requests that began with {job.context:,} tokens each")
    console.print(f"prefill, hand-over, transfer: one prompt of {job.prompt:,} tokens")
    console.print(f"contiguous per block of {job.block_tokens} tokens: {pages} (per layer, cross-layer)")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("measure", "layout", "ms", "range", "ratio to per layer"):
        table.add_column(name, justify="left" if name in {"measure", "layout"} else "right", no_wrap=True)
    for name in MEASURES:
        for layout in CPU_LAYOUTS:
            times = Spread.of([one[layout] for one in found[name]])
            table.add_row(
                name if layout == PER_LAYER else "",
                f"{layout}, per layer" if layout == PER_LAYER else layout,
                f"{times.median * 1e3:.2f}",
                f"{times.low * 1e3:.2f}-{times.high * 1e3:.2f}",
                "" if layout == PER_LAYER else _text(ratio(found[name], layout)),
            )
    console.print(table)
    console.print("all layouts gave the same tokens")


def as_json(job: AttentionJob, found: Found) -> dict[str, Any]:
    """Return all counted rounds as values for JSON, in seconds."""
    return {**asdict(job), "seconds": found}


def ratio(rounds: Sequence[Mapping[str, float]], layout: str) -> Spread:
    """Return a layout's seconds divided by those of the per-layer layout, round by round."""
    return Spread.of([one[layout] / one[PER_LAYER] for one in rounds])


def _text(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.low:.2f}-{spread.high:.2f})"
