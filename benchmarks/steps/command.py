"""`python -m benchmarks steps`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from kvferry.tools.cli.bench import progress_line


def steps(
    requests: Annotated[int, typer.Option(min=1, help="Requests that each engine decodes.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds.")] = 9,
    per_round: Annotated[int, typer.Option("--steps", min=1, help="Steps of each round.")] = 40,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: all steps, in seconds.")] = False,
) -> None:
    """Time connectors' hooks in steps that only decode.

    Compares kvferry with NixlConnector, after subtracting the time of a connector that does nothing. Each
    connector runs in a vLLM engine of its own; the engines take turns.
    """
    from rich.console import Console

    from benchmarks.steps import report
    from benchmarks.steps.measure import measure

    with tempfile.TemporaryDirectory() as folder, progress_line() as progress:
        found = measure(requests, rounds, per_round, folder=Path(folder), progress=progress)
    if as_json:
        print(json.dumps(found))
    else:
        report.show(found, requests, Console(highlight=False))
