"""`python -m benchmarks startup`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.handover.model import MODELS
from kvferry.common.errors import ConfigError
from kvferry.tools.cli.bench import parse_names, progress_line, work_folder

_FAMILIES = [one.name for one in MODELS]


def startup(
    family: Annotated[str, typer.Option(help=f"Model family: {', '.join(_FAMILIES)}.")] = "qwen3",
    cache: Annotated[int, typer.Option(min=64, help="Size of the KV cache in MiB.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to count.")] = 5,
    path: Annotated[
        Path | None,
        typer.Option(help="Folder for files; by default a new one in the user's cache, removed after."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: all starts, in seconds and bytes.")
    ] = False,
) -> None:
    """Measure what a connector adds to an engine's start.

    Starts a vLLM engine in a fresh process without a connector, with NixlConnector, with kvferry between
    peers, and with kvferry over a host tier and a file tier. Variants take turns in rotating order.
    """
    from rich.console import Console

    from benchmarks.startup import report
    from benchmarks.startup.measure import measure

    chosen = parse_names(family, _FAMILIES, "family")
    if len(chosen) > 1:
        raise ConfigError(f"--family {family} names {len(chosen)} families; name one")
    (model,) = (one for one in MODELS if one.name == chosen[0])
    with work_folder(path) as folder, progress_line() as progress:
        found = measure(model, rounds, cache << 20, folder=folder, progress=progress)
    if as_json:
        print(json.dumps(report.as_json(family, cache << 20, found)))
    else:
        report.show(found, Console(highlight=False))
