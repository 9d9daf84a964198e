"""`kvferry doctor`: check for problems that keep KV from moving."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import typer

from kvferry.common.machine import require_linux
from kvferry.tools.cli.options import argument, check_output, command, flag, option
from kvferry.tools.extras import BENCH, require

_BAD = 1


@dataclass(frozen=True)
class DoctorOptions:
    """The options of `kvferry doctor`."""

    urls: list[str] | None = argument(
        "URL",
        "Running engines or routers: http://host:port or host:port, or kvferry://host:port of a control "
        "channel.",
        None,
    )
    prefill: list[str] | None = option(None, "URL", "URL of a prefill engine; repeatable.")
    decode: list[str] | None = option(None, "URL", "URL of a decode engine; repeatable.")
    config: Path | None = option(
        None, "FILE", "File with the output of `kvferry config`, or with kv_connector_extra_config."
    )
    secret_file: Path | None = option(
        None, "FILE", "File with the engines' secret; by default the one in --config, or this machine's."
    )
    machine: bool = flag("--machine/--no-machine", "Check this machine too.", default=True)
    calibrate: bool = flag(
        "--calibrate",
        "First measure what reads and copies cost here, and write it to the file by which engines choose how "
        "to move KV. Run it while nothing else runs.",
    )
    as_json: bool = flag("--json", "Print the findings as JSON.")


@command
def doctor(options: DoctorOptions) -> None:
    """Check this machine, a configuration and running engines.

    Reports what to fix, and how. Exit code 0: nothing to fix; 1: something to fix; 2: an argument cannot be
    used. An engine given by its HTTP address computes a prompt of four tokens.
    """
    from rich.console import Console

    from kvferry.tools.doctor.engines import parse_target
    from kvferry.tools.doctor.examine import Examination, examine
    from kvferry.tools.doctor.finding import as_json, is_well, print_report
    from kvferry.tools.serving.role import Role

    if options.calibrate:
        require_linux("kvferry doctor --calibrate")
        require("kvferry doctor --calibrate", BENCH)
    # Without a handler, Python would print warnings of the checked code between the findings.
    logging.getLogger("kvferry").addHandler(logging.NullHandler())
    named = {Role.BOTH: options.urls, Role.PREFILL: options.prefill, Role.DECODE: options.decode}
    job = Examination(
        tuple(parse_target(text, role) for role, texts in named.items() for text in texts or ()),
        str(options.config) if options.config else None,
        str(options.secret_file) if options.secret_file else None,
        options.machine,
        options.calibrate,
    )
    # The checks take a minute, and their findings would be lost.
    check_output()
    with Console(stderr=True).status("starting") as status:
        found = examine(job, lambda text: status.update(f"{text} ..."))
    if options.as_json:
        print(json.dumps(as_json(found)))
    else:
        print_report(found, Console(highlight=False))
    if not is_well(found):
        raise typer.Exit(_BAD)
