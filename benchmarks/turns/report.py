"""The report of `benchmarks turns`, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.phrases import verdict
from benchmarks.turns.measure import FamilyTurns, TurnLoad
from kvferry.common.units import format_bytes


def show(found: Sequence[FamilyTurns], console: Console) -> None:
    """Print one table per family with at most 80 columns."""
    for one in found:
        console.print(f"{one.family}, blocks of {one.block_tokens} tokens:")
        console.print(_table(one))
        before, after = (sum(load.total_bytes for load in loads[1:]) for loads in (one.without, one.shared))
        console.print(
            f"turns 2 to {len(one.shared)}: {format_bytes(before)} without, {format_bytes(after)} with, "
            f"{after / max(before, 1):.2f} of it"
        )
        console.print(
            f"at most {most_again(one)} tokens are read again, less than a block: "
            f"{verdict(reached=is_reached(one))}\n"
        )


def most_again(one: FamilyTurns) -> int:
    """Return the maximum number of tokens that a turn reads again with shared blocks."""
    return max(load.again for load in one.shared[1:])


def is_reached(one: FamilyTurns) -> bool:
    """Return whether each turn reads new tokens, one state, and less than a block of known tokens."""
    states = {load.state_bytes for load in one.shared}
    return len(states) == 1 and most_again(one) < one.block_tokens


def as_json(found: Sequence[FamilyTurns]) -> list[dict[str, Any]]:
    """Return all loads, and the derived figures, as values for JSON."""
    return [{**asdict(one), "most_again": most_again(one), "reached": is_reached(one)} for one in found]


def _table(one: FamilyTurns) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    read = ("read without\nsharing", "bytes", "read with\nsharing", "bytes")
    for name in ("turn", "prompt", "new", *read, "state"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, (without, shared) in enumerate(zip(one.without, one.shared, strict=True), 1):
        table.add_row(
            str(number),
            str(shared.prompt),
            str(shared.prompt - 1 - shared.known),
            *_read(without),
            *_read(shared),
            format_bytes(shared.state_bytes),
        )
    return table


def _read(load: TurnLoad) -> tuple[str, str]:
    return f"{load.end - load.begin} tokens", format_bytes(load.total_bytes)
