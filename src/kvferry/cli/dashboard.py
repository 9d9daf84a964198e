"""`kvferry dashboard`: write a Grafana dashboard and Prometheus alerts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from kvferry.cli.options import write_file
from kvferry.errors import ConfigError


def dashboard(
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for the files; created if it does not exist.")
    ] = Path(),
) -> None:
    """Write a Grafana dashboard and Prometheus alerts.

    The files are kvferry-dashboard.json and kvferry-alerts.yaml.
    """
    from kvferry.observe.dashboard import dashboard as model, rules

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ConfigError(
            f"cannot create the folder {out}: {reason}; name one that can be created"
        ) from error
    files = {"kvferry-dashboard.json": json.dumps(model(), indent=2) + "\n", "kvferry-alerts.yaml": rules()}
    for name, text in files.items():
        write_file(out / name, text)
        print(out / name)
