"""The report of `benchmarks handover`, as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.handover.engine import Stamps
from benchmarks.handover.measure import Handover, Load
from benchmarks.handover.model import HandoverModel
from kvferry.tools.measuring.rounds import Spread

Found = Mapping[Load, Mapping[str, Sequence[Handover]]]
"""Hand-overs by load and by connector."""

_ENDS = ("added", "answered")
"""Stamps of a request to a server."""

LIMIT_SECONDS = 1e-3
"""Goal: kvferry's median is at most this much above that of NixlConnector with the same advantages."""


def show(model: HandoverModel, found: Found, console: Console, *, served: bool) -> None:
    """Print the times of one model, with at most 80 columns.

    Args:
        model: model family.
        found: hand-overs of the model.
        console: console to print on.
        served: True if the engines were servers, so that there are no stages.
    """
    console.print(f"\n{model.name} ({model.title}), milliseconds to the first token")
    if "nixl+" in next(iter(found.values())):
        console.print("nixl+: NixlConnector with a sleeping progress thread and huge pages")
        console.print("difference: kvferry minus nixl+")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("tokens", "requests"):
        table.add_column(name, justify="right")
    for name in next(iter(found.values())):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("difference", justify="right")
    for load, times in found.items():
        row = [_milliseconds(Spread.of([one.seconds for one in each])) for each in times.values()]
        table.add_row(f"{load.tokens:,}", str(load.requests), *row, _difference(times))
    console.print(table)
    if served:
        console.print("time over HTTP, from sending the decode request to its answer")
        console.print("for the stages, run without --served")
    else:
        _show_stages(found, console)


def _show_stages(found: Found, console: Console) -> None:
    console.print("stages, medians in milliseconds (other: threads, and NixlConnector's transfer):")
    stages = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    names = list(next(iter(found.values()))["kvferry"][0].stages())
    for name in ("load", "connector", *names):
        stages.add_column(name, justify="left" if name == "connector" else "right")
    for load, times in found.items():
        for connector, handovers in times.items():
            each = [one.stages() for one in handovers]
            row = [f"{Spread.of([one[name] for one in each]).median * 1e3:.2f}" for name in names]
            stages.add_row(f"{load.tokens}x{load.requests}", connector, *row)
    console.print(stages)


def as_json(found: Mapping[str, Found], *, served: bool) -> dict[str, Any]:
    """Return the stamps of all requests, in seconds, as values for JSON.

    Args:
        found: hand-overs of each model, by its name.
        served: True if the engines were servers: only the stamps ``added`` (the client began to send the
            request) and ``answered`` are given.
    """
    stamped = _ENDS if served else tuple(field.name for field in fields(Stamps))
    return {
        model: [
            {
                **asdict(load),
                "served": served,
                "connectors": {
                    name: [
                        [{stamp: getattr(stamps, stamp) for stamp in stamped} for stamps in one.stamps]
                        for one in each
                    ]
                    for name, each in times.items()
                },
            }
            for load, times in by_load.items()
        ]
        for model, by_load in found.items()
    }


def _milliseconds(spread: Spread) -> str:
    return f"{spread.median * 1e3:.1f} ({spread.low * 1e3:.1f}-{spread.high * 1e3:.1f})"


def _difference(times: Mapping[str, Sequence[Handover]]) -> str:
    """Return the median of kvferry's time minus nixl+'s over the rounds, in milliseconds, as a text."""
    if "nixl+" not in times:
        return "-"
    pairs = zip(times["kvferry"], times["nixl+"], strict=True)
    return f"{Spread.of([ours.seconds - theirs.seconds for ours, theirs in pairs]).median * 1e3:+.1f}"
