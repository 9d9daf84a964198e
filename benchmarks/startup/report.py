"""The report of `benchmarks startup`, as text and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.startup.measure import Round, Start
from benchmarks.startup.variants import NIXL, NONE, VARIANTS
from kvferry.tools.measuring.rounds import Spread

_MIB = 1 << 20


def show(found: Sequence[Round], console: Console) -> None:
    """Print the counted rounds as tables with at most 80 columns."""
    console.print("start, from before the connector's import until the engine is ready:")
    table = _table("connector", "seconds (range)", "minus none", "ratio to none", "ratio to Nixl")
    for name in VARIANTS:
        table.add_row(
            name,
            _text(_of(found, name, lambda start: start.seconds)),
            "" if name == NONE else f"{_difference(found, name).median:+.2f}",
            "" if name == NONE else _text(ratio(found, name, NONE)),
            "" if name in {NONE, NIXL} else _text(ratio(found, name, NIXL)),
        )
    console.print(table)
    console.print("\nof this, and after it (medians; memory in MiB when ready, with child processes):")
    parts = _table("connector", "import s", "processor s", "stop s", "RSS", "PSS", "PSS minus none")
    for name in VARIANTS:
        pss = _of(found, name, lambda start: start.ready.pss_bytes).median
        none = _of(found, NONE, lambda start: start.ready.pss_bytes).median
        parts.add_row(
            name,
            f"{_of(found, name, lambda start: start.ready.import_seconds).median:.2f}",
            f"{_of(found, name, lambda start: start.ready.cpu_seconds).median:.2f}",
            f"{_of(found, name, lambda start: start.stop_seconds).median:.2f}",
            f"{_of(found, name, lambda start: start.ready.rss_bytes).median / _MIB:,.0f}",
            f"{pss / _MIB:,.0f}",
            "" if name == NONE else f"{(pss - none) / _MIB:+,.0f}",
        )
    console.print(parts)


def as_json(family: str, cache_bytes: int, found: Sequence[Round]) -> dict[str, Any]:
    """Return all counted starts as values for JSON, in seconds and bytes.

    Args:
        family: name of the model family.
        cache_bytes: size of the KV cache, in bytes.
        found: counted rounds.
    """
    return {
        "family": family,
        "cache_bytes": cache_bytes,
        "rounds": [
            {name: {**asdict(start), "seconds": start.seconds} for name, start in one.items()}
            for one in found
        ],
    }


def ratio(found: Sequence[Round], name: str, other: str) -> Spread:
    """Return the seconds of one variant's start divided by those of another one, round by round."""
    return Spread.of([one[name].seconds / one[other].seconds for one in found])


def _difference(found: Sequence[Round], name: str) -> Spread:
    return Spread.of([one[name].seconds - one[NONE].seconds for one in found])


def _of(found: Sequence[Round], name: str, value: Callable[[Start], float]) -> Spread:
    return Spread.of([value(one[name]) for one in found])


def _text(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.low:.2f}-{spread.high:.2f})"


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name == "connector" else "right", no_wrap=True)
    return table
