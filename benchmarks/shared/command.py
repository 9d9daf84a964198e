"""`python -m benchmarks shared`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kvferry.tools.cli.bench import progress_line


def shared(
    mebibytes: Annotated[int, typer.Option(min=16, help="Size of the request's KV, in MiB.")] = 256,
    repeats: Annotated[int, typer.Option(min=7, help="Number of rounds; each measures every row once.")] = 9,
    transports: Annotated[str, typer.Option(help="UCX_TLS for both processes.")] = "tcp,self",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: all rounds, in seconds.")] = False,
) -> None:
    """Load KV by READs and through shared host memory, between two processes.

    Forces UCX onto TCP, as on a machine where it does not find a better transport for the cache. One engine
    has the reader's layout, and another a layout whose runs are short. Every row takes its turn in every
    round.
    """
    from rich.console import Console

    from benchmarks.shared import report
    from benchmarks.shared.measure import measure

    with progress_line() as progress:
        found = measure(mebibytes << 20, repeats, transports, progress)
    if as_json:
        print(json.dumps(report.as_json(found)))
    else:
        report.show(found, Console(highlight=False))
