"""`kvferry top`: live metrics of engines, in the terminal or in Grafana and Prometheus."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvferry.cli.options import write_file
from kvferry.cli.output import INTERRUPTED
from kvferry.errors import ConfigError

_FAILED = 1


def top(
    urls: Annotated[
        list[str] | None,
        typer.Argument(metavar="URL", help="URLs of engines, or of a kvferry router in front of them."),
    ] = None,
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
    dashboard: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Instead write kvferry-dashboard.json for Grafana and kvferry-alerts.yaml for Prometheus to "
            "this folder, which is created if it does not exist.",
        ),
    ] = None,
) -> None:
    """Watch engines: hits, misses, loads, tiers, failures.

    Shows all engines together, then one line per engine. Press Tab for the next engine in detail, Escape for
    all engines, q to quit. With --dashboard, Grafana and Prometheus show the same metrics.
    """
    if dashboard is not None:
        if urls:
            raise ConfigError("--dashboard reads no engine; leave out the URLs, or --dashboard")
        _write_dashboard(dashboard)
        return
    if not urls:
        raise ConfigError("URL is missing; give the address of an engine or a router, or --dashboard DIR")
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


def _write_dashboard(folder: Path) -> None:
    """Write the dashboard and the alerts to a folder, and print the paths of the files.

    Raises:
        ConfigError: the folder cannot be created, or the files cannot be written.
    """
    from kvferry.observe.dashboard import dashboard, rules

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ConfigError(
            f"cannot create the folder {folder}: {reason}; name one that can be created"
        ) from error
    for name, text in (
        ("kvferry-dashboard.json", json.dumps(dashboard(), indent=2) + "\n"),
        ("kvferry-alerts.yaml", rules()),
    ):
        write_file(folder / name, text)
        print(folder / name)


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
