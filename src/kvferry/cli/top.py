"""`kvferry top`: live metrics of engines."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer

from kvferry.cli.output import INTERRUPTED

_FAILED = 1


def top(
    urls: Annotated[
        list[str],
        typer.Argument(metavar="URL", help="URLs of engines, or of a kvferry router in front of them."),
    ],
    interval: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0.1,
            max=3600,
            help="Time between two readings of /metrics, over which rates are computed.",
        ),
    ] = 1.0,
    once: Annotated[
        bool,
        typer.Option(
            "--once", help="Read twice, print, and exit; the default without a terminal, and on Windows."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Read twice and print JSON: bytes, seconds, shares.")
    ] = False,
) -> None:
    """Watch engines live: hits, misses, loads, tiers, failures.

    Shows all engines together, then one line per engine. Press Tab for the next engine in detail, Escape for
    all engines, q to quit.
    """
    import anyio
    from rich.console import Console

    from kvferry.operating_system import has_posix
    from kvferry.terminal import output_width
    from kvferry.top.lines import text
    from kvferry.top.live import sample_fleet, watch
    from kvferry.top.poller import parse_address

    addresses = list(dict.fromkeys(parse_address(url) for url in urls))
    console = Console(highlight=False)
    drawn = console.is_terminal and not console.is_dumb_terminal and sys.stdin.isatty() and has_posix()
    if drawn and not (once or as_json):
        anyio.run(watch, addresses, interval, console)
        return
    try:
        found = anyio.run(sample_fleet, addresses, interval)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        print(json.dumps(as_plain(asdict(found))))
    else:
        print(text(found, output_width(), interval), end="")
    if not found.answering:
        raise typer.Exit(_FAILED)


def as_plain(value: Any) -> Any:
    """Return a copy of a value in which None replaces infinite numbers and NaN, which JSON cannot represent.

    Args:
        value: nested value that consists of dicts, lists, tuples, texts and numbers. Tuples become lists.
    """
    if isinstance(value, dict):
        return {key: as_plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
