"""`python -m benchmarks choice`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvferry.common.errors import ConfigError
from kvferry.tools.cli.bench import progress_line, work_folder


def choice(
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Requests that were recorded, in Mooncake's format: one JSON object per line. By default "
            "conversations that are drawn."
        ),
    ] = None,
    sources: Annotated[
        str, typer.Option(help="Between which: connectors, side by side, or tiers of one.")
    ] = "connectors",
    requests: Annotated[int, typer.Option(min=2, help="Requests of a replay.")] = 32,
    block: Annotated[int, typer.Option(min=16, max=512, help="Tokens of the trace's blocks, here.")] = 64,
    longest: Annotated[int, typer.Option(min=64, help="Tokens of a prompt, at most.")] = 2048,
    apart: Annotated[float, typer.Option(min=1, help="How many times as fast the near source is.")] = 20,
    near: Annotated[
        float,
        typer.Option(min=0, max=1, help="Share of all that is asked that the near source has room for."),
    ] = 0.25,
    rounds: Annotated[int, typer.Option(min=1, help="Replays by each policy, after one to learn.")] = 3,
    path: Annotated[
        Path | None,
        typer.Option(help="Folder for files; by default a new one in the user's cache, removed after."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: all requests, in seconds and tokens.")
    ] = False,
) -> None:
    """Replay requests by every policy for choosing a source.

    The near source is files with room for a part of what is asked. The far source is an object store that
    has all of it and is many times slower. Engines, tiers and the object server behind a narrow line are
    real. The report says when the first token comes by each policy, and which source supplied what.
    """
    from rich.console import Console

    from benchmarks.choice import report
    from benchmarks.choice.measure import SOURCES, ChoiceJob, measure
    from benchmarks.choice.workload import draw_workload, read_trace, select_conversations

    if sources not in SOURCES:
        raise ConfigError(f"--sources {sources} is not known; choose one of {', '.join(SOURCES)}")
    workload = (
        draw_workload(block, longest, requests)
        if trace is None
        else select_conversations(trace.name, read_trace(trace), block, longest, requests)
    )
    with work_folder(path) as folder, progress_line() as progress:
        measured = measure(
            ChoiceJob(workload=workload, sources=sources, apart=apart, near=near, rounds=rounds, path=folder),
            progress,
        )
    if as_json:
        print(json.dumps(report.as_json(measured)))
    else:
        report.show(measured, Console(highlight=False))
