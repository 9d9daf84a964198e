"""`kvferry top`: live metrics of engines, in the terminal or in Grafana and Prometheus."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from kvferry.common.errors import ConfigError
from kvferry.tools.cli.options import INTERRUPTED, argument, command, flag, option, write_file

_FAILED = 1


@dataclass(frozen=True)
class TopOptions:
    """The options of `kvferry top`."""

    urls: list[str] | None = argument(
        "URL", "URLs of engines, or of a kvferry router in front of them.", None
    )
    interval: float = option(
        1.0,
        "SECONDS",
        "Time between two readings of /metrics, over which rates are computed.",
        min=0.1,
        max=3600,
    )
    once: bool = flag(
        "--once", "Read twice, print, and exit; the default without a terminal, and on Windows."
    )
    as_json: bool = flag("--json", "Read twice and print JSON: bytes, seconds, shares.")
    dashboard: Path | None = option(
        None,
        "DIR",
        "Instead write kvferry-dashboard.json for Grafana and kvferry-alerts.yaml for Prometheus to this "
        "folder, which is created if it does not exist.",
    )


@command
def top(options: TopOptions) -> None:
    """Watch engines: hits, misses, loads, tiers, failures.

    Shows all engines together, then one line per engine. Press Tab for the next engine in detail, Escape for
    all engines, q to quit. With --dashboard, Grafana and Prometheus show the same metrics.
    """
    if options.dashboard is not None:
        if options.urls:
            raise ConfigError("--dashboard reads no engine; leave out the URLs, or --dashboard")
        _write_dashboard(options.dashboard)
        return
    if not options.urls:
        raise ConfigError("URL is missing; give the address of an engine or a router, or --dashboard DIR")
    import anyio
    from rich.console import Console

    from kvferry.common.machine import has_posix
    from kvferry.tools.report import output_width
    from kvferry.tools.top.lines import text
    from kvferry.tools.top.live import sample_fleet, watch
    from kvferry.tools.top.poller import parse_address

    # One engine given twice would be counted twice.
    addresses = list(dict.fromkeys(parse_address(url) for url in options.urls))
    console = Console(highlight=False)
    # The live view needs the keys of a terminal, which it reads with POSIX calls.
    drawn = console.is_terminal and not console.is_dumb_terminal and sys.stdin.isatty() and has_posix()
    if drawn and not (options.once or options.as_json):
        anyio.run(watch, addresses, options.interval, console)
        return
    try:
        found = anyio.run(sample_fleet, addresses, options.interval)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    if options.as_json:
        print(json.dumps(as_plain(asdict(found))))
    else:
        print(text(found, output_width(), options.interval), end="")
    if not found.answering:
        raise typer.Exit(_FAILED)


def _write_dashboard(folder: Path) -> None:
    from kvferry.tools.dashboard import dashboard, rules

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ConfigError(
            f"cannot create the folder {folder}: {reason}; name one that can be created"
        ) from error
    # The names say whose files they are: the folder may be one of Grafana or Prometheus.
    for name, text in (
        ("kvferry-dashboard.json", json.dumps(dashboard(), indent=2) + "\n"),
        ("kvferry-alerts.yaml", rules()),
    ):
        write_file(folder / name, text)
        print(folder / name)


def as_plain(value: Any) -> Any:
    """Return a copy of a nested value with None for infinite numbers and NaN, which JSON cannot represent."""
    if isinstance(value, dict):
        return {key: as_plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
