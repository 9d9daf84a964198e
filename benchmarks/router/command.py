"""`python -m benchmarks router`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

_VLLM_ROUTER = Path(".venv/fronts/bin/vllm-router")


def router(
    requests: Annotated[int, typer.Option(min=1, help="Requests of each round.")] = 300,
    connections: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 8,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 1000,
    events: Annotated[int, typer.Option(min=1, help="Events of a streamed answer.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the routers take turns.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: the CPU times of all rounds.")] = False,
) -> None:
    """Measure the router's CPU time per request, and that of vllm-router.

    Both stand before the same engines. These are stubs that answer at once, because only the routers are
    measured. `make .venv/.fronts` installs vllm-router, without which kvferry's router is measured alone.
    """
    from rich.console import Console

    from benchmarks.router import report
    from benchmarks.router.measure import Load, measure

    load = Load(requests, connections, prompt, events, rounds)
    theirs = _VLLM_ROUTER if _VLLM_ROUTER.exists() else None
    console = Console(highlight=False)
    if theirs is None and not as_json:
        console.print("vllm-router is not installed and is left out; `make .venv/.fronts` installs it")
    with tempfile.TemporaryDirectory() as folder:
        found = measure(load, theirs, Path(folder))
    if as_json:
        print(json.dumps(report.as_json(found)))
    else:
        report.show(found, console)
