"""The report of `benchmarks router`, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.phrases import verdict
from benchmarks.router.measure import Cpu
from kvferry.tools.measuring.rounds import Spread

_MOST = 2.0
"""Largest wanted ratio of kvferry's CPU time to that of the other router."""


def ratios(found: Sequence[Cpu]) -> dict[bool, Spread]:
    """Return kvferry's CPU time divided by the other router's, round by round, by whether answers stream.

    Empty if the other router was not measured.
    """
    times = {(one.router, one.stream): one.milliseconds for one in found}
    return {
        stream: Spread.of(
            [
                ours / theirs
                for ours, theirs in zip(times["kvferry", stream], times["vllm-router", stream], strict=True)
            ]
        )
        for stream in (False, True)
        if ("vllm-router", stream) in times
    }


def show(found: Sequence[Cpu], console: Console) -> None:
    """Print the CPU times with at most 80 columns."""
    console.print("CPU time of the router per request, in milliseconds (engines are stubs):")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("answer", "router", "median", "range of rounds"):
        table.add_column(name, justify="left" if name in ("answer", "router") else "right")
    for one in found:
        spread = Spread.of(one.milliseconds)
        kind = "stream" if one.stream else "whole"
        table.add_row(kind, one.router, f"{spread.median:.2f}", f"{spread.low:.2f}-{spread.high:.2f}")
    console.print(table)
    for stream, ratio in ratios(found).items():
        kind = "stream" if stream else "whole"
        console.print(
            f"{kind}: kvferry takes {ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f}) of vllm-router's; "
            f"at most {_MOST:g}: {verdict(reached=ratio.median <= _MOST)}"
        )


def as_json(found: Sequence[Cpu]) -> dict[str, Any]:
    """Return all CPU times and their ratios as values for JSON."""
    named = {"stream" if stream else "whole": asdict(ratio) for stream, ratio in ratios(found).items()}
    return {"cpu": [asdict(one) for one in found], "ratios": named}
