"""`python -m benchmarks scale`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kvferry.tools.cli.bench import parse_names, progress_line


def scale(
    cases: Annotated[
        str,
        typer.Option(help="Cases to measure, separated by commas: chunks, peers, requests, steps, tokens."),
    ] = "chunks,peers,requests,steps,tokens",
    rounds: Annotated[int, typer.Option(min=1, help="Counted rounds of each size.")] = 5,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: all rounds, in seconds and bytes per unit.")
    ] = False,
) -> None:
    """Measure time and memory per unit as numbers grow.

    Chunks in host memory, peers of an engine, requests that a producer retains, requests for which a step has
    nothing to do, and tokens of a prompt, each at four numbers. A figure per unit that stays the same means
    that the whole grows in proportion.
    """
    from rich.console import Console

    from benchmarks.scale import report
    from benchmarks.scale.measure import CASES, measure

    chosen = parse_names(cases, CASES, "cases")
    with progress_line() as progress:
        found = measure([CASES[name] for name in chosen], rounds, progress)
    if as_json:
        print(json.dumps(report.as_json(found, rounds)))
    else:
        report.show(found, rounds, Console(highlight=False))
