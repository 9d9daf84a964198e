"""The report of `benchmarks storage`, as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.storage.engine import COMPUTE, EXAMPLE, FILE, HOST
from benchmarks.storage.rounds import Measured, PromptRounds
from kvferry.common.units import format_bytes
from kvferry.tools.measuring.rounds import Spread

NAMES: Mapping[str, str] = {
    COMPUTE: "computing",
    EXAMPLE: "ExampleConnector",
    FILE: "kvferry, files",
    HOST: "kvferry, host",
}
"""Names of the variants in the report."""

_FLUSHED, _COLD = "  flushed to disk", "  from disk"


def show(found: Measured, console: Console) -> None:
    """Print the times with at most 80 columns."""
    sizes = ", ".join(f"{one.tokens:,} tokens {format_bytes(one.bytes)}" for one in found.prompts)
    console.print(f"KV of a prompt: {sizes}")
    how = "past" if found.direct_io else "through"
    console.print(f"From disk, ExampleConnector reads through the page cache, kvferry {how} it")
    console.print("\nstoring a new prompt, milliseconds more than computing it, median (range):")
    console.print(_storing(found))
    console.print("\nfirst token of a stored prompt, milliseconds, median (range):")
    console.print(_loading(found))
    console.print("\nfirst token of a prompt whose first half is stored, milliseconds:")
    console.print(_sharing(found))
    for name, error in found.peers.items():
        console.print(f"\n{name}: {'works here, not measured' if error is None else error}")


def as_json(found: Measured) -> dict[str, Any]:
    """Return all times, in seconds, as values for JSON."""
    return asdict(found)


def _storing(found: Measured) -> Table:
    table = _table("first token", "until stored")
    for one in found.prompts:
        rows = [
            (NAMES[name], _added(one, name, "new"), _added(one, name, "stored"))
            for name in (EXAMPLE, FILE, HOST)
        ]
        rows.insert(1, (_FLUSHED, "", _added(one, EXAMPLE, "flushed")))
        _add_rows(table, one, [(f"{NAMES[COMPUTE]}, in all", _of(one, COMPUTE, "new"), ""), *rows])
    return table


def _loading(found: Measured) -> Table:
    table = _table("first token", "loaded tokens")
    for one in found.prompts:
        loaded = {name: f"{one.rounds[0][name].load_tokens:,}" for name in NAMES}
        rows = [(NAMES[name], _of(one, name, "load"), loaded[name]) for name in (EXAMPLE, FILE, HOST)]
        for place, name in ((1, EXAMPLE), (3, FILE)):
            rows.insert(place, (_COLD, _of(one, name, "disk_load"), loaded[name]))
        _add_rows(table, one, [(NAMES[COMPUTE], _of(one, COMPUTE, "new"), loaded[COMPUTE]), *rows])
    return table


def _sharing(found: Measured) -> Table:
    table = _table("first token", "loaded tokens")
    for one in found.prompts:
        rows = [
            (NAMES[name], _of(one, name, "shared"), f"{one.rounds[0][name].shared_tokens:,}")
            for name in NAMES
        ]
        _add_rows(table, one, rows)
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("connector", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _add_rows(table: Table, one: PromptRounds, rows: Sequence[tuple[str, str, str]]) -> None:
    for number, row in enumerate(rows):
        table.add_row("" if number else f"{one.tokens:,}", *row)


def _of(one: PromptRounds, variant: str, work: str) -> str:
    """Return a variant's time in milliseconds, as a text."""
    return _milliseconds(Spread.of([getattr(each[variant], work) for each in one.rounds]))


def _added(one: PromptRounds, variant: str, work: str) -> str:
    """Return a variant's time minus that of computing in the same round, in milliseconds, as a text."""
    added = Spread.of([getattr(each[variant], work) - each[COMPUTE].new for each in one.rounds])
    return f"{added.median * 1e3:+,.0f} ({added.low * 1e3:,.0f} to {added.high * 1e3:,.0f})"


def _milliseconds(spread: Spread) -> str:
    digits = 0 if spread.median >= 1 else 1
    low, high = (f"{each * 1e3:,.{digits}f}" for each in (spread.low, spread.high))
    return f"{spread.median * 1e3:,.{digits}f} ({low}-{high})"
