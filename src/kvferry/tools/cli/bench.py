"""`kvferry bench`: compare moving and keeping KV with what this machine can do."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import typer

from kvferry.tools.cli.bench_options import (
    REPEATS_HELP,
    TRANSPORTS_HELP,
    MovedModel,
    parse_layouts,
    progress_line,
    work_folder,
)
from kvferry.tools.cli.options import command, count, flag, option
from kvferry.tools.cli.output import check_output
from kvferry.tools.cli.usage import CommandGroup
from kvferry.errors import ConfigError
from kvferry.extras import BENCH, require
from kvferry.operating_system import require_linux

_MAX_DEPTH = 256
_JSON_HELP = "Print JSON: all rounds, in seconds and bytes."

app = typer.Typer(
    cls=CommandGroup,
    help="Measure how fast this machine moves and keeps KV.",
    no_args_is_help=True,
    callback=check_output,  # a measurement takes minutes, so a closed pipe is found before it
)


@dataclass(frozen=True)
class TransferOptions(MovedModel):
    """The options of `kvferry bench transfer`."""

    tokens: int = count(4096, "Length of the moved request, in tokens.", least=1)
    order: str = option(
        "scattered", None, "Order of block ids: scattered, as in a busy engine, or contiguous."
    )
    repeats: int = option(9, None, REPEATS_HELP, min=7)
    transports: str | None = option(None, None, TRANSPORTS_HELP)
    as_json: bool = flag("--json", _JSON_HELP)


@app.command()
@command
def transfer(options: TransferOptions) -> None:
    """Compare a KV transfer over NIXL with raw NIXL and memcpy.

    Moves KV between two processes. kvferry's time starts when a request's blocks are known and ends when the
    request may use them. It includes planning, posting, the lease check and the acknowledgement.
    """
    require_linux("kvferry bench transfer")
    require("kvferry bench transfer", BENCH)
    from kvferry.tools.bench import transfer_report
    from kvferry.tools.bench.transfer import TransferJob, measure
    from kvferry.tools.measuring.simulated import ORDERS
    from kvferry.tools.plan.side import EngineSide
    from kvferry.report import Report

    if options.order not in ORDERS:
        raise ConfigError(f"--order {options.order} is not known; choose one of {', '.join(ORDERS)}")
    reading = options.read()
    if len(set(reading.cache.layers)) > 1:
        raise ConfigError(
            f"--geometry {options.geometry} has layers of several kinds; this command moves models whose "
            "layers are alike"
        )
    with progress_line() as progress:
        measured = measure(
            TransferJob(
                reading=reading,
                side=EngineSide(block_tokens=options.block_size),
                tokens=options.tokens,
                order=options.order,
                repeats=options.repeats,
                transports=options.transports,
            ),
            progress,
        )
    if options.as_json:
        print(json.dumps(transfer_report.as_json(measured)))
    else:
        transfer_report.show(measured, Report.to_stdout())


@dataclass(frozen=True)
class TiersOptions:
    """The options of `kvferry bench tiers`."""

    geometry: str = option(
        "Llama-3.1-8B", None, "Model whose chunks to store and load, as `kvferry plan` takes it."
    )
    layers: int = option(16, None, "Number of layers, instead of the model's.", min=1)
    layouts: str = option(
        "LBNHC,BHLNC", None, "Memory layouts to measure for the host tier, separated by commas."
    )
    block_size: int | None = count(None, "Tokens per block; by default 16.", least=1)
    depths: str = option("1,8,32", None, "Numbers of chunks in flight to measure, separated by commas.")
    path: Path | None = option(
        None, None, "Folder for files; by default a new one in the user's cache, removed at the end."
    )
    url: str | None = option(None, "URL", "Object storage, such as s3://bucket/path.", "--object")
    repeats: int = option(7, None, REPEATS_HELP, min=7)
    as_json: bool = flag("--json", _JSON_HELP)


@app.command()
@command
def tiers(options: TiersOptions) -> None:
    """Compare storing and loading chunks in tiers with raw storage.

    Compares host memory with memcpy, files with fio or threads with direct I/O, and objects with obstore.
    """
    require_linux("kvferry bench tiers")
    require("kvferry bench tiers", BENCH)
    from kvferry.tools.bench import tiers_report
    from kvferry.tools.bench.tiers import TiersJob, measure
    from kvferry.tools.measuring.simulated import read_geometry
    from kvferry.tools.plan.side import EngineSide
    from kvferry.report import Report

    reading = read_geometry(options.geometry, {"num_hidden_layers": options.layers})
    layouts = parse_layouts(options.layouts)
    depths = _parse_depths(options.depths)
    with work_folder(options.path) as folder, progress_line() as progress:
        measured = measure(
            TiersJob(
                reading=reading,
                sides=tuple(EngineSide(layout=one, block_tokens=options.block_size) for one in layouts),
                depths=depths,
                repeats=options.repeats,
                path=folder,
                url=options.url,
            ),
            progress,
        )
    if options.as_json:
        print(json.dumps(tiers_report.as_json(measured)))
    else:
        tiers_report.show(measured, Report.to_stdout())


def _parse_depths(text: str) -> tuple[int, ...]:
    names = text.split(",")
    if wrong := [name for name in names if not name.isdecimal() or not 0 < int(name) <= _MAX_DEPTH]:
        raise ConfigError(f"--depths {wrong[0]} is not a number from 1 to {_MAX_DEPTH}")
    return tuple(sorted({int(name) for name in names}))
