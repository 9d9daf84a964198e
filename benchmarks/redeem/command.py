"""`python -m benchmarks redeem`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kvferry.tools.cli.bench import progress_line


def redeem(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 131_072,
    rounds: Annotated[int, typer.Option(min=100, help="Tickets to redeem at each producer.")] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: all rounds, in seconds.")] = False,
) -> None:
    """Redeem tickets between two processes.

    A decode engine exchanges a request's ticket for block tables before it reads. Measures how long that
    takes at a peer that it knows, with and without a sealed grant, how often a step waits for the answer, and
    how much it adds to meeting a new peer. Also measures how long sealed grants are.
    """
    from rich.console import Console

    from benchmarks.redeem import report
    from benchmarks.redeem.measure import measure, measure_seals

    with progress_line() as progress:
        found, sizes = measure(rounds, tokens, progress), measure_seals()
    if as_json:
        print(json.dumps(report.as_json(found, sizes, tokens)))
    else:
        console = Console(highlight=False)
        report.show(found, tokens, console)
        report.show_seals(sizes, console)
