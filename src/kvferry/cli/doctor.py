"""`kvferry doctor`: check for problems that keep KV from moving."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Annotated

import typer

from kvferry.cli.output import check_output
from kvferry.extras import BENCH, require
from kvferry.operating_system import require_linux

_BAD = 1


def doctor(
    urls: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="URL",
            help="Running engines or routers: http://host:port or host:port, or kvferry://host:port of a "
            "control channel.",
        ),
    ] = None,
    prefill: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="URL of a prefill engine; repeatable.")
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="URL of a decode engine; repeatable.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with the output of `kvferry config`, or with kv_connector_extra_config.",
        ),
    ] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with the engines' secret; by default the one in --config, or this machine's.",
        ),
    ] = None,
    machine: Annotated[bool, typer.Option("--machine/--no-machine", help="Check this machine too.")] = True,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="First measure what reads and copies cost here, and write it to the file by which engines "
            "choose how to move KV. Run it while nothing else runs.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this machine, a configuration and running engines.

    Reports what to fix, and how. Exit code 0: nothing to fix; 1: something to fix; 2: an argument cannot be
    used. An engine given by its HTTP address computes a prompt of four tokens.
    """
    from rich.console import Console

    from kvferry.doctor import report
    from kvferry.doctor.engines import parse_target
    from kvferry.doctor.examine import Examination, examine
    from kvferry.doctor.finding import is_well
    from kvferry.serving.role import Role

    if calibrate:
        require_linux("kvferry doctor --calibrate")
        require("kvferry doctor --calibrate", BENCH)
    logging.getLogger("kvferry").addHandler(logging.NullHandler())
    named = ((urls, Role.BOTH), (prefill, Role.PREFILL), (decode, Role.DECODE))
    job = Examination(
        tuple(parse_target(text, role) for texts, role in named for text in texts or ()),
        str(config) if config else None,
        str(secret_file) if secret_file else None,
        machine,
        calibrate,
    )
    check_output()
    with Console(stderr=True).status("starting") as status:
        found = examine(job, lambda text: status.update(f"{text} ..."))
    if as_json:
        print(json.dumps(report.as_json(found)))
    else:
        report.print_report(found, Console(highlight=False))
    if not is_well(found):
        raise typer.Exit(_BAD)
