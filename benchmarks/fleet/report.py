"""The report of `benchmarks fleet`, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.fleet.first_token import FirstTokens
from benchmarks.fleet.measure import LookUps, Reads
from kvferry.common.units import format_bytes, format_seconds
from kvferry.tools.measuring.rounds import Spread


def show_reads(found: Sequence[Reads], console: Console) -> None:
    """Print the READs with at most 80 columns."""
    console.print("chunks in another process's host memory; raw: the same READs, without asking or digests")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("model", "chunk", "found in", "raw", "speed/raw: 1 thread", "8 threads"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for one in found:
        size = one.chunks * one.chunk_bytes
        raw = Spread.of([size / each.raw for each in one.rounds])
        speeds = [
            Spread.of([each.raw / getattr(each, name) for each in one.rounds]) for name in ("one", "eight")
        ]
        table.add_row(
            one.model,
            format_bytes(one.chunk_bytes),
            format_seconds(Spread.of([each.find for each in one.rounds]).median),
            f"{raw.median / 1e9:.1f} GB/s",
            *(f"{each.median:.2f} ({each.low:.2f}-{each.high:.2f})" for each in speeds),
        )
    console.print(table)


def show_first_tokens(found: Sequence[FirstTokens], console: Console) -> None:
    """Print the times to the first token with at most 80 columns."""
    console.print("first token of a prompt that another vLLM engine has in host memory:")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("tokens", "KV", "computed", "read", "read/computed"):
        table.add_column(name, justify="right")
    for one in found:
        ratio = Spread.of([read / computed for read, computed in zip(one.read, one.computed, strict=True)])
        table.add_row(
            f"{one.tokens:,}",
            format_bytes(one.kv_bytes),
            *(format_seconds(Spread.of(times).median) for times in (one.computed, one.read)),
            f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})",
        )
    console.print(table)


def show_look_ups(found: LookUps, console: Console) -> None:
    """Print the look-ups with at most 80 columns."""
    console.print(
        f"directory of {found.engines:,} engines and {found.chunks:,} chunks: "
        f"{format_bytes(found.used_bytes)}, {found.used_bytes / found.chunks:.0f} bytes per chunk; "
        f"one engine publishes {found.published_per_second:,.0f} chunks per second"
    )
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("keys of a prompt", "median", "90 %", "99 %"):
        table.add_column(name, justify="right")
    for keys in found.seconds:
        table.add_row(f"{keys:,}", *map(format_seconds, found.percentiles(keys)))
    console.print(table)


def as_json(
    reads: Sequence[Reads], tokens: Sequence[FirstTokens], look_ups: LookUps | None
) -> dict[str, Any]:
    """Return all rounds in seconds as values for JSON."""
    return {
        "reads": [asdict(one) for one in reads],
        "first_tokens": [asdict(one) for one in tokens],
        "directory": None if look_ups is None else asdict(look_ups),
    }
