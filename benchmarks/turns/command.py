"""`python -m benchmarks turns`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvferry.tools.cli.bench import parse_names, progress_line, work_folder


def turns(
    families: Annotated[
        str, typer.Option(help="Model families, separated by commas.")
    ] = "qwen3next,nemotronh,lfm2",
    turns: Annotated[int, typer.Option(min=2, help="Turns of the conversation.")] = 8,
    first: Annotated[int, typer.Option(min=2, help="Tokens of the first prompt.")] = 600,
    question: Annotated[int, typer.Option(min=1, help="Tokens that each further turn asks.")] = 100,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 24,
    path: Annotated[
        Path | None,
        typer.Option(help="Folder for checkpoints; by default a new one in the user's cache, removed after."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: all loads.")] = False,
) -> None:
    """Lead one conversation through a prefill and a decode engine.

    Models are tiny checkpoints with random weights. Both engines are real, and the decode engine reads over
    NIXL. The report compares what it reads if it shares its own attention blocks between turns, and if it
    does not, as vLLM does where it lacks recurrent state.
    """
    from rich.console import Console

    from benchmarks.turns import report
    from benchmarks.turns.measure import Conversation, measure
    from kvferry.tools.serving.tiny.families import FAMILIES

    names = parse_names(families, FAMILIES, "families")
    conversation = Conversation(turns=turns, first=first, question=question, answer=answer)
    with work_folder(path) as folder, progress_line() as progress:
        found = [measure(name, conversation, folder, progress) for name in names]
    if as_json:
        print(json.dumps(report.as_json(found)))
    else:
        report.show(found, Console(highlight=False))
