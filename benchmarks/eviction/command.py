"""`python -m benchmarks eviction`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kvferry.tools.cli.bench import progress_line


def eviction(
    trace: Annotated[
        list[str] | None,
        typer.Option(help="NAME=TRACE, a trace or workload that `kvferry replay` reads. Repeatable."),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="Model; by default all of them. Repeatable.")
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Eviction policy; by default all of them. Repeatable.")
    ] = None,
    skip: Annotated[int, typer.Option(min=0, help="Requests at the begin of each trace to leave out.")] = 0,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests of each trace to replay; by default all.")
    ] = None,
    concurrency: Annotated[
        int, typer.Option(min=0, help="Sessions at a time; 0 if they begin at their times.")
    ] = 0,
    share: Annotated[
        list[float] | None,
        typer.Option(min=0, max=1, help="Capacity, of what all chunks take; by default five. Repeatable."),
    ] = None,
    speed: Annotated[bool, typer.Option("--speed", help="Measure the time of evictions instead.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare what eviction policies save of the computation of prompts.

    Replays each trace with each model, five capacities of host memory, from 2 to 40 % of what all chunks of
    the trace take, and each policy. Shares are of a bound that no policy can exceed.
    """
    from benchmarks.eviction import report
    from benchmarks.eviction.costs import COSTS
    from benchmarks.eviction.measure import POLICIES, SHARES, Excerpt, measure
    from benchmarks.eviction.speed import measure_speed
    from kvferry.tools.replay.trace.open import open_trace
    from kvferry.tools.report import Report

    if speed:
        with progress_line() as progress:
            times = measure_speed(progress)
        report.show_speed(times, Report.to_stdout())
        return
    named = [text.partition("=") for text in trace or ["chats=users=500,turns=6"]]
    with progress_line() as progress:
        found = measure(
            {name: open_trace(path) for name, _, path in named},
            model or list(COSTS),
            {name: POLICIES[name] for name in policy or POLICIES},
            progress,
            Excerpt(skip, requests, concurrency),
            share or SHARES,
        )
    if as_json:
        print(json.dumps(report.as_json(found)))
    else:
        report.show(found, Report.to_stdout())
