"""The report of `benchmarks streaming`, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.streaming.measure import CHUNK_TOKENS, KV_BYTES, FirstToken
from kvferry.common.units import format_bytes, format_seconds


def show(found: Sequence[FirstToken], console: Console) -> None:
    """Print medians with at most 80 columns."""
    console.print(
        f"time to first token; {format_bytes(KV_BYTES)} of KV per token, {CHUNK_TOKENS:,} tokens per step"
    )
    console.print("left: time from the prefill engine's answer to the first token")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    names = ("total,\nat the end", "total,\nstreamed", "ratio", "left,\nat the end", "left,\nstreamed")
    for name in ("link", "tokens", "KV", *names):
        table.add_column(name, justify="left" if name == "link" else "right")
    for gigabits, tokens in dict.fromkeys((one.gigabits, one.tokens) for one in found):
        after, during = (_of(found, gigabits, tokens, streamed=streamed) for streamed in (False, True))
        table.add_row(
            f"{gigabits:g} Gbit/s" if gigabits else "no limit",
            f"{tokens:,}",
            format_bytes(tokens * KV_BYTES),
            format_seconds(median(one.seconds for one in after)),
            format_seconds(median(one.seconds for one in during)),
            f"{ratio(found, gigabits, tokens):.2f}",
            format_seconds(median(one.left_seconds for one in after)),
            format_seconds(median(one.left_seconds for one in during)),
        )
    console.print(table)


def ratio(found: Sequence[FirstToken], gigabits: float, tokens: int) -> float:
    """Return the median over pairs of requests: time to first token streamed, divided by that at the end."""
    after, during = (_of(found, gigabits, tokens, streamed=streamed) for streamed in (False, True))
    return median(b.seconds / a.seconds for a, b in zip(after, during, strict=True))


def as_json(found: Sequence[FirstToken]) -> dict[str, Any]:
    """Return all times in seconds as values for JSON."""
    return {
        "chunk_tokens": CHUNK_TOKENS,
        "kv_bytes_per_token": KV_BYTES,
        "requests": [{**asdict(one), "left_seconds": one.left_seconds} for one in found],
    }


def _of(found: Sequence[FirstToken], gigabits: float, tokens: int, *, streamed: bool) -> list[FirstToken]:
    wanted = (gigabits, tokens, streamed)
    return [one for one in found if (one.gigabits, one.tokens, one.streamed) == wanted]
