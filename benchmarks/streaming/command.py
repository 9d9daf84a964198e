"""`python -m benchmarks streaming`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kvferry.tools.cli.bench import progress_line


def streaming(
    tokens: Annotated[list[int] | None, typer.Option(min=1, help="Tokens of a prompt; repeatable.")] = None,
    link: Annotated[
        list[float] | None,
        typer.Option(min=0, help="Rate of the link in Gbit/s; 0 for no limit; repeatable."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Requests of each kind.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: all requests, in seconds.")] = False,
) -> None:
    """Hand over KV while the prompt is computed, and after it.

    Starts a prefill and a decode engine in two network namespaces, which needs root. The link between them
    has a rate limit. Measures the time to first token, and how much of it is left after the prefill.
    """
    from rich.console import Console

    from benchmarks.streaming import report
    from benchmarks.streaming.measure import measure

    with progress_line() as progress:
        found = measure(tokens or [2048, 4096, 8192, 16384], link or [1.0, 10.0, 0.0], rounds, progress)
    if as_json:
        print(json.dumps(report.as_json(found)))
    else:
        report.show(found, Console(highlight=False))
