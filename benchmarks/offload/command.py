"""`python -m benchmarks offload`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvferry.tools.cli.bench import parse_names, progress_line, work_folder
from kvferry.tools.cli.options import without_none


def offload(
    parts: Annotated[
        str, typer.Option(help="Parts to measure, separated by commas: lookup, asking, hooks, ttft.")
    ] = "lookup",
    geometry: Annotated[
        str, typer.Option(help="Model whose chunks to look up, as `kvferry plan` takes it.")
    ] = "Llama-3.1-8B",
    layers: Annotated[int, typer.Option(min=1, help="Number of layers, instead of the model's.")] = 16,
    path: Annotated[
        Path | None,
        typer.Option(help="Folder for files; by default a new one in the user's cache, removed after."),
    ] = None,
    stored: Annotated[int, typer.Option(min=1, help="Chunks in the index for lookup.")] = 1_000_000,
    prompt: Annotated[int, typer.Option(min=512, help="Tokens of the prompt for ttft.")] = 16_384,
    rounds: Annotated[int, typer.Option(min=1, help="Prompts to measure the time to first token with.")] = 3,
    repeats: Annotated[
        int, typer.Option(min=7, help="Rounds of lookup; asking takes ten times as many.")
    ] = 7,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: all rounds, in seconds and bytes.")
    ] = False,
) -> None:
    """Measure what tiers cost a scheduler and an engine, and what they bring.

    lookup: how long a scheduler looks for the chunks of a long prompt. asking: how long it asks five sources
    for it. hooks: time inside the connector's hooks per step of a real engine on this machine's processors.
    ttft: a prompt's first token from every tier of that engine. `kvferry bench tiers` measures their speed.
    """
    from rich.console import Console

    from benchmarks.offload import report
    from benchmarks.offload.engine_parts import EngineRequests
    from benchmarks.offload.measure import PARTS, OffloadJob, measure
    from kvferry.tools.measuring.simulated import read_geometry

    chosen = parse_names(parts, PARTS, "parts")
    reading = read_geometry(geometry, without_none(num_hidden_layers=layers))
    with work_folder(path) as folder, progress_line() as progress:
        measured = measure(
            OffloadJob(
                reading=reading,
                parts=chosen,
                repeats=repeats,
                path=folder,
                stored=stored,
                asked=EngineRequests(prompt, rounds),
            ),
            progress,
        )
    if as_json:
        print(json.dumps(report.as_json(measured)))
    else:
        report.show(measured, Console(highlight=False))
