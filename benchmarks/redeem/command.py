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
    takes at a peer that it knows, how often a step waits for the answer, and how much it adds to meeting a
    new peer.
    """
    from rich.console import Console

    from benchmarks.redeem import report
    from benchmarks.redeem.measure import measure

    with progress_line() as progress:
        found = measure(rounds, tokens, progress)
    if as_json:
        print(json.dumps(report.as_json(found, tokens)))
    else:
        report.show(found, tokens, Console(highlight=False))
