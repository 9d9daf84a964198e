"""The report of `benchmarks redeem`, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.phrases import verdict
from benchmarks.redeem.measure import PRODUCERS, RedeemTimes
from kvferry.common.units import format_seconds
from kvferry.connector.peers.source import STEP_WAIT_SECONDS

TARGET_SECONDS = 0.5e-3
"""Target for the median time to redeem a ticket at a known, idle peer, in seconds."""


def show(found: Sequence[RedeemTimes], tokens: int, console: Console) -> None:
    """Print the times with at most 80 columns."""
    console.print(f"tickets for prompts of {tokens:,} tokens, redeemed at a known peer:")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("producer", "median", "90 %", "99 %", f"within {format_seconds(STEP_WAIT_SECONDS)}"):
        table.add_column(name, justify="left" if name == "producer" else "right", no_wrap=name != "producer")
    for one in found:
        table.add_row(one.producer, *map(format_seconds, one.percentiles()), f"{one.within_a_step:.0%}")
    console.print(table)
    for one in found:
        ratio = one.beside_handshake
        console.print(
            f"a new peer, {one.producer}: with a ticket {ratio.median:.2f} times as long as without "
            f"({ratio.low:.2f}-{ratio.high:.2f} in {len(one.both)} pairs)",
            highlight=False,
        )
    (rest,) = (one for one in found if one.producer == PRODUCERS[0])
    reached = rest.percentiles()[0] < TARGET_SECONDS
    console.print(f"median at rest under {format_seconds(TARGET_SECONDS)}: {verdict(reached=reached)}")


def as_json(found: Sequence[RedeemTimes], tokens: int) -> dict[str, Any]:
    """Return all rounds in seconds, and the derived figures, as values for JSON."""
    return {
        "tokens": tokens,
        "producers": [
            {
                **asdict(one),
                "percentiles": dict(zip(("50", "90", "99"), one.percentiles(), strict=True)),
                "within_a_step": one.within_a_step,
                "beside_handshake": asdict(one.beside_handshake),
            }
            for one in found
        ],
    }
