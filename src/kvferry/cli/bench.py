"""`kvferry bench`: what this machine reaches."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kvferry.errors import ConfigError

_REPEATS_HELP = "Rounds; each moves the bytes once in every way."


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    bench = typer.Typer(help="Measure what this machine reaches.", no_args_is_help=True)
    bench.command()(transfer)
    app.add_typer(bench, name="bench")


def transfer(
    geometry: Annotated[str, typer.Option(help="Whose KV cache, as `kvferry plan` takes it.")] = "Llama-3.1-8B",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the request that is moved.")] = 4096,
    layers: Annotated[int | None, typer.Option(min=1, help="Instead of the geometry's.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Instead of the geometry's.")] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="Instead of the geometry's.")] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens of a block; 16 by default.")] = None,
    dtype: Annotated[str, typer.Option(help="Of an element: auto, float32, bfloat16, fp8, ...")] = "auto",
    order: Annotated[
        str, typer.Option(help="Block tables: scattered, as in a busy engine, or contiguous.")
    ] = "scattered",
    repeats: Annotated[int, typer.Option(min=7, help=_REPEATS_HELP)] = 9,
    transports: Annotated[
        str | None, typer.Option(help="UCX_TLS for both processes, e.g. tcp,self. By default as it is.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: all rounds, in seconds and bytes.")
    ] = False,
) -> None:
    """Move KV cache between two processes over NIXL, beside raw NIXL and memcpy.

    kvferry's time is that of a request: from the moment its blocks are known until they may be used, with
    planning, posting, the lease check and the acknowledgement. Also measured: planning a long request, and
    the time spent inside an engine's hooks while transfers run.
    """
    from rich.console import Console

    from kvferry.bench import report
    from kvferry.bench.engines import ORDERS, read_geometry
    from kvferry.bench.transfer import Job, measure
    from kvferry.plan.side import Side

    if order not in ORDERS:
        raise ConfigError(f"--order {order} is not known; choose one of {', '.join(ORDERS)}")
    changes = {"num_hidden_layers": layers, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    changed = {name: value for name, value in changes.items() if value is not None}
    reading = read_geometry(geometry, changed, dtype)
    if len(set(reading.cache.layers)) > 1:
        raise ConfigError(
            f"--geometry {geometry} has layers of several kinds; bench layout measures those, this command "
            "models whose layers are alike"
        )
    with Console(stderr=True).status("starting") as status:
        measured = measure(
            Job(reading, Side(block_tokens=block_size), tokens, order, repeats, transports), lambda text: status.update(f"{text} ...")
        )
    if as_json:
        print(json.dumps(report.as_json(measured)))
    else:
        report.show(measured, Console(highlight=False))
