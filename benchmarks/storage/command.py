"""`python -m benchmarks storage`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvferry.common.errors import ConfigError
from kvferry.tools.cli.bench import progress_line, work_folder

_STEP = 512  # half of it is a chunk, the least that kvferry finds of a longer prompt


def storage(
    prompts: Annotated[
        str, typer.Option(help="Lengths of prompts in tokens, multiples of 512, separated by commas.")
    ] = "512,2048,8192",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to count.")] = 3,
    path: Annotated[
        Path | None,
        typer.Option(help="Folder for files; by default a new one in the user's cache, removed after."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: all rounds, in seconds.")] = False,
) -> None:
    """Store and load prompts, beside vLLM's ExampleConnector.

    Measures the first token of a new prompt, of a stored one, and of one that shares its first half with a
    stored one. Each connector has a vLLM engine on this machine's processors; the engines take turns.
    """
    from rich.console import Console

    from benchmarks.storage import report
    from benchmarks.storage.measure import measure

    lengths = _lengths(prompts)
    with work_folder(path) as folder, progress_line() as progress:
        found = measure(lengths, rounds, folder, progress)
    if as_json:
        print(json.dumps(report.as_json(found)))
    else:
        report.show(found, Console(highlight=False))


def _lengths(text: str) -> list[int]:
    lengths = []
    for one in text.split(","):
        if not one.isdecimal() or int(one) < _STEP or int(one) % _STEP:
            raise ConfigError(f"--prompts {one} is not a multiple of {_STEP} tokens, such as 2048")
        lengths.append(int(one))
    return sorted(set(lengths))
