"""The report of `benchmarks steps`, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from kvferry.tools.measuring.rounds import Spread, percentile


def medians(found: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, list[float]]:
    """Return the median step of each round, in seconds, by connector."""
    return {name: [percentile(steps, 50) for steps in rounds] for name, rounds in found.items()}


def own_seconds(found: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, list[float]]:
    """Return the median step of each round minus that of the empty connector, in seconds, by connector."""
    times = medians(found)
    return {
        name: [mine - empty for mine, empty in zip(each, times["empty"], strict=True)]
        for name, each in times.items()
    }


def show(found: Mapping[str, Sequence[Sequence[float]]], requests: int, console: Console) -> None:
    """Print the times with at most 80 columns."""
    console.print(f"a connector's hooks per step, {requests} requests decoding, in microseconds:")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("connector", "median", "range of rounds", "minus empty", "ratio to nixl"):
        table.add_column(name, justify="left" if name == "connector" else "right")
    times, own = medians(found), own_seconds(found)
    for name, each in times.items():
        spread = Spread.of(each)
        share = Spread.of([mine / theirs for mine, theirs in zip(own[name], own["nixl"], strict=True)])
        table.add_row(
            name,
            f"{spread.median * 1e6:.0f}",
            f"{spread.low * 1e6:.0f}-{spread.high * 1e6:.0f}",
            f"{Spread.of(own[name]).median * 1e6:.0f}",
            f"{share.median:.2f} ({share.low:.2f}-{share.high:.2f})",
        )
    console.print(table)
