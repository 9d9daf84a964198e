"""`python -m benchmarks replay`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvferry.tools.cli.bench import progress_line, work_folder
from kvferry.tools.extras import BENCH, require


def replay(
    trace: Annotated[
        Path | None,
        typer.Option(help="Trace that `kvferry replay` reads. By default conversations that are made up."),
    ] = None,
    requests: Annotated[int, typer.Option(min=100, help="Requests of the made-up trace.")] = 20_000,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of every simulation.")] = 3,
    path: Annotated[
        Path | None,
        typer.Option(help="Folder for the trace; by default a new one in the user's cache, removed after."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: all runs, in seconds and bytes.")
    ] = False,
) -> None:
    """Measure replays of a trace: CPU time and memory.

    Every run is a process of its own, and the runs of all simulations alternate. The limit is to read the
    trace without a simulation. The peer is the package kvcache-simulator.
    """
    require("python -m benchmarks replay", BENCH)
    from benchmarks.replay import report
    from benchmarks.replay.measure import measure
    from benchmarks.replay.trace import write_trace
    from kvferry.tools.report import Report

    with work_folder(path) as folder, progress_line() as progress:
        if trace is None:
            trace = folder / "trace.jsonl"
            write_trace(trace, requests)
        found = measure(trace, rounds, progress)
    if as_json:
        print(json.dumps(report.as_json(found)))
    else:
        report.show(found, Report.to_stdout())
