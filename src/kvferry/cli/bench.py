"""`kvferry bench`: compare moving and keeping KV with what this machine can do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvferry.cli.bench_options import (
    REPEATS_HELP,
    BlockSize,
    Dtype,
    HeadDim,
    KvHeads,
    Layers,
    Transports,
    parse_layouts,
    progress_line,
    work_folder,
)
from kvferry.cli.options import count_option, without_none
from kvferry.cli.output import check_output
from kvferry.cli.usage import CommandGroup
from kvferry.errors import ConfigError
from kvferry.extras import BENCH, require
from kvferry.operating_system import require_linux

_MAX_DEPTH = 256


app = typer.Typer(
    cls=CommandGroup,
    help="Measure how fast this machine moves and keeps KV.",
    no_args_is_help=True,
    callback=check_output,
)


@app.command()
def transfer(
    geometry: Annotated[
        str, typer.Option(help="Model whose KV cache to move, as `kvferry plan` takes it.")
    ] = "Llama-3.1-8B",
    tokens: Annotated[int, count_option("Length of the moved request, in tokens.", least=1)] = 4096,
    layers: Layers = None,
    kv_heads: KvHeads = None,
    head_dim: HeadDim = None,
    block_size: BlockSize = None,
    dtype: Dtype = "auto",
    order: Annotated[
        str, typer.Option(help="Order of block ids: scattered, as in a busy engine, or contiguous.")
    ] = "scattered",
    repeats: Annotated[int, typer.Option(min=7, help=REPEATS_HELP)] = 9,
    transports: Transports = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: all rounds, in seconds and bytes.")
    ] = False,
) -> None:
    """Compare a KV transfer over NIXL with raw NIXL and memcpy.

    Moves KV between two processes. kvferry's time starts when a request's blocks are known and ends when the
    request may use them. It includes planning, posting, the lease check and the acknowledgement.
    """
    require_linux("kvferry bench transfer")
    require("kvferry bench transfer", BENCH)
    from kvferry.bench import transfer_report
    from kvferry.bench.transfer import TransferJob, measure
    from kvferry.measuring.simulated import ORDERS, read_geometry
    from kvferry.plan.side import EngineSide
    from kvferry.report import Report

    if order not in ORDERS:
        raise ConfigError(f"--order {order} is not known; choose one of {', '.join(ORDERS)}")
    changes = without_none(num_hidden_layers=layers, num_key_value_heads=kv_heads, head_dim=head_dim)
    reading = read_geometry(geometry, changes, dtype)
    if len(set(reading.cache.layers)) > 1:
        raise ConfigError(
            f"--geometry {geometry} has layers of several kinds; this command moves models whose layers "
            "are alike"
        )
    with progress_line() as progress:
        measured = measure(
            TransferJob(
                reading=reading,
                side=EngineSide(block_tokens=block_size),
                tokens=tokens,
                order=order,
                repeats=repeats,
                transports=transports,
            ),
            progress,
        )
    if as_json:
        print(json.dumps(transfer_report.as_json(measured)))
    else:
        transfer_report.show(measured, Report.to_stdout())


@app.command()
def tiers(
    geometry: Annotated[
        str, typer.Option(help="Model whose chunks to store and load, as `kvferry plan` takes it.")
    ] = "Llama-3.1-8B",
    layers: Annotated[int, typer.Option(min=1, help="Number of layers, instead of the model's.")] = 16,
    layouts: Annotated[
        str, typer.Option(help="Memory layouts to measure for the host tier, separated by commas.")
    ] = "LBNHC,BHLNC",
    block_size: BlockSize = None,
    depths: Annotated[
        str, typer.Option(help="Numbers of chunks in flight to measure, separated by commas.")
    ] = "1,8,32",
    path: Annotated[
        Path | None,
        typer.Option(help="Folder for files; by default a new one in the user's cache, removed at the end."),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option("--object", metavar="URL", help="Object storage, such as s3://bucket/path."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=7, help=REPEATS_HELP)] = 7,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: all rounds, in seconds and bytes.")
    ] = False,
) -> None:
    """Compare storing and loading chunks in tiers with raw storage.

    Compares host memory with memcpy, files with fio or threads with direct I/O, and objects with obstore.
    """
    require_linux("kvferry bench tiers")
    require("kvferry bench tiers", BENCH)
    from kvferry.bench import tiers_report
    from kvferry.bench.tiers import TiersJob, measure
    from kvferry.measuring.simulated import read_geometry
    from kvferry.plan.side import EngineSide
    from kvferry.report import Report

    reading = read_geometry(geometry, without_none(num_hidden_layers=layers))
    sides = tuple(EngineSide(layout=layout, block_tokens=block_size) for layout in parse_layouts(layouts))
    chunks_in_flight = _parse_depths(depths)
    with work_folder(path) as folder, progress_line() as progress:
        measured = measure(
            TiersJob(
                reading=reading, sides=sides, depths=chunks_in_flight, repeats=repeats, path=folder, url=url
            ),
            progress,
        )
    if as_json:
        print(json.dumps(tiers_report.as_json(measured)))
    else:
        tiers_report.show(measured, Report.to_stdout())


def _parse_depths(text: str) -> tuple[int, ...]:
    names = text.split(",")
    if wrong := [name for name in names if not name.isdecimal() or not 0 < int(name) <= _MAX_DEPTH]:
        raise ConfigError(f"--depths {wrong[0]} is not a number from 1 to {_MAX_DEPTH}")
    return tuple(sorted({int(name) for name in names}))
