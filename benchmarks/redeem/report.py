"""The report of `benchmarks redeem`, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.phrases import verdict
from benchmarks.redeem.measure import PRODUCERS, RedeemTimes, SealSize
from kvferry.common.units import format_seconds
from kvferry.connector.peers.source import STEP_WAIT_SECONDS

TARGET_SECONDS = 0.5e-3
"""Target for the median time to redeem a ticket at a known, idle peer, in seconds."""


def show(found: Sequence[RedeemTimes], tokens: int, console: Console) -> None:
    """Print the times with at most 80 columns."""
    console.print(f"tickets for prompts of {tokens:,} tokens, redeemed at a known peer:")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("producer", "grant", "median", "90 %", "99 %", f"in {format_seconds(STEP_WAIT_SECONDS)}"):
        text = name in ("producer", "grant")
        table.add_column(name, justify="left" if text else "right", no_wrap=name != "producer")
    for one in found:
        table.add_row(
            one.producer, "asked for", *map(format_seconds, one.percentiles()), f"{one.within_a_step:.0%}"
        )
        table.add_row("", "sealed", *map(format_seconds, one.percentiles(sealed=True)), "")
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


def show_seals(sizes: Sequence[SealSize], console: Console) -> None:
    """Print lengths of sealed grants and the times to seal and open them with at most 80 columns."""
    console.print("sealed grants of prompts, in a pool that other prompts have used:")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("family", "tokens", "characters", "sealed in", "opened in"):
        table.add_column(name, justify="left" if name == "family" else "right")
    for one in sizes:
        opened = format_seconds(one.open_seconds) if one.characters else ""
        characters = f"{one.characters:,}" if one.characters else "none"
        table.add_row(one.family, f"{one.tokens:,}", characters, format_seconds(one.seal_seconds), opened)
    console.print(table)


def as_json(found: Sequence[RedeemTimes], sizes: Sequence[SealSize], tokens: int) -> dict[str, Any]:
    """Return all rounds in seconds, and the derived figures, as values for JSON."""
    return {
        "tokens": tokens,
        "seals": [asdict(one) for one in sizes],
        "producers": [
            {
                **asdict(one),
                "percentiles": dict(zip(("50", "90", "99"), one.percentiles(), strict=True)),
                "sealed_percentiles": dict(
                    zip(("50", "90", "99"), one.percentiles(sealed=True), strict=True)
                ),
                "within_a_step": one.within_a_step,
                "beside_handshake": asdict(one.beside_handshake),
            }
            for one in found
        ],
    }
