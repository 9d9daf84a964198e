"""`python -m benchmarks copies`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kvferry.tools.cli.bench import progress_line


def copies(
    mebibytes: Annotated[int, typer.Option(min=8, help="Size of a copy, in MiB.")] = 32,
    repeats: Annotated[int, typer.Option(min=7, help="Number of rounds; each measures every copy once.")] = 9,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: all rounds, in seconds.")] = False,
) -> None:
    """Compare copies of scattered KV blocks: the kernel in C, numpy and memcpy.

    One thread copies cells between scattered blocks and packed memory. Runs get longer from row to row; the
    last rows transpose keys, as CPU engines keep them. memcpy copies as many contiguous bytes in the same
    round. Takes a minute, and twelve times the size of a copy in memory.
    """
    from rich.console import Console

    from benchmarks.copies import report
    from benchmarks.copies.measure import measure

    with progress_line() as progress:
        found = measure(mebibytes << 20, repeats, progress)
    if as_json:
        print(json.dumps(report.as_json(found)))
    else:
        report.show(found, Console(highlight=False))
