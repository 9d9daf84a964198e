"""The report of `benchmarks storage`, as text and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.storage.engine import COMPUTE, EXAMPLE, FILE, HOST
from benchmarks.storage.rounds import Measured, PromptRounds, VariantRound
from kvferry.measuring.spread import Spread
from kvferry.units import format_bytes

NAMES: Mapping[str, str] = {
    COMPUTE: "computing",
    EXAMPLE: "ExampleConnector",
    FILE: "kvferry, files",
    HOST: "kvferry, host memory",
}
"""Names of the variants in the report."""

_FLUSHED, _COLD = "ExampleConnector, flushed", "ExampleConnector, disk"
_Round = Mapping[str, VariantRound]


def show(found: Measured, console: Console) -> None:
    """Print the times with at most 80 columns."""
    sizes = ", ".join(f"{one.tokens:,} tokens {format_bytes(one.bytes)}" for one in found.prompts)
    console.print(f"KV of a prompt: {sizes}")
    how = "without" if found.direct_io else "through"
    console.print(f"ExampleConnector reads through the page cache, kvferry {how} it")
    console.print("\nstoring a new prompt, milliseconds more than computing it, median (range):")
    console.print(_storing(found))
    console.print("\nfirst token of a stored prompt, milliseconds, median (range):")
    console.print(_first_tokens(found, _loads))
    console.print("\nfirst token of a prompt whose first half is stored:")
    console.print(_first_tokens(found, _shares))
    for name, error in found.peers.items():
        console.print(f"\n{name}: {'works here, not measured' if error is None else error}")


def as_json(found: Measured) -> dict[str, Any]:
    """Return all times, in seconds, as values for JSON."""
    return asdict(found)


def _storing(found: Measured) -> Table:
    table = _table("first token", "until stored")
    for one in found.prompts:
        computed = Spread.of([each[COMPUTE].new for each in one.rounds])
        rows = [(f"{NAMES[COMPUTE]}, all of it", _milliseconds(computed), "")]
        for name in (EXAMPLE, FILE, HOST):
            new = _added(one, lambda each, name=name: each[name].new)
            stored = _added(one, lambda each, name=name: each[name].stored)
            rows.append((NAMES[name], new, stored))
        rows.insert(2, (_FLUSHED, "", _added(one, lambda each: each[EXAMPLE].flushed)))
        _add_rows(table, one, rows)
    return table


def _first_tokens(found: Measured, rows: Callable[[PromptRounds], Iterator[tuple[str, ...]]]) -> Table:
    table = _table("milliseconds", "loaded")
    for one in found.prompts:
        _add_rows(table, one, list(rows(one)))
    return table


def _loads(one: PromptRounds) -> Iterator[tuple[str, ...]]:
    first = one.rounds[0]
    yield NAMES[COMPUTE], _of(one, lambda each: each[COMPUTE].new), "0"
    for name in (EXAMPLE, FILE, HOST):
        loaded = f"{first[name].load_tokens:,}"
        yield NAMES[name], _of(one, lambda each, name=name: each[name].load), loaded
        if name == EXAMPLE:
            yield _COLD, _of(one, lambda each: each[EXAMPLE].disk_load), loaded


def _shares(one: PromptRounds) -> Iterator[tuple[str, ...]]:
    for name in (COMPUTE, EXAMPLE, FILE, HOST):
        loaded = f"{one.rounds[0][name].shared_tokens:,}"
        yield NAMES[name], _of(one, lambda each, name=name: each[name].shared), loaded


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("tokens", justify="right")
    table.add_column("connector", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _add_rows(table: Table, one: PromptRounds, rows: list[tuple[str, ...]]) -> None:
    for number, row in enumerate(rows):
        table.add_row("" if number else f"{one.tokens:,}", *row)


def _of(one: PromptRounds, time: Callable[[_Round], float | None]) -> str:
    return _milliseconds(Spread.of([time(each) or 0.0 for each in one.rounds]))


def _added(one: PromptRounds, time: Callable[[_Round], float | None]) -> str:
    """Return a time minus that of computing in the same round, in milliseconds, as a text."""
    added = Spread.of([(time(each) or 0.0) - each[COMPUTE].new for each in one.rounds])
    return f"{added.median * 1e3:+,.0f} ({added.low * 1e3:+,.0f} to {added.high * 1e3:+,.0f})"


def _milliseconds(spread: Spread) -> str:
    digits = 0 if spread.median >= 1 else 1
    low, high = (f"{each * 1e3:,.{digits}f}" for each in (spread.low, spread.high))
    return f"{spread.median * 1e3:,.{digits}f} ({low}-{high})"
