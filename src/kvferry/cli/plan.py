"""`kvferry plan`: what handing a model's KV cache over will take."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvferry.cli.options import given, write
from kvferry.errors import ConfigError

if TYPE_CHECKING:
    from kvferry.geometry.models import ModelReading
    from kvferry.plan.forecast import Forecast


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("plan")(plan)


def plan(
    model: Annotated[
        str | None, typer.Argument(help="A config.json, its folder, a name of the table, an id of the hub.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt that is handed over.")] = 4096,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of the engine that has it.")] = 1,
    to_tp: Annotated[int | None, typer.Option(help="Of the one that gets it; the same by default.")] = None,
    pp: Annotated[int, typer.Option(help="Pipeline ranks of the engine that has it.")] = 1,
    to_pp: Annotated[int | None, typer.Option(help="Of the one that gets it; the same by default.")] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens of a block; vLLM's choice by default.")
    ] = None,
    to_block_size: Annotated[
        int | None, typer.Option(help="Of the one that gets it; as --block-size by default.")
    ] = None,
    layout: Annotated[
        str,
        typer.Option(help="Axes of its memory: auto, LBNHC (NHD), LBHNC (HND), LHBNC, BLHNC, BLNHC, BHLNC."),
    ] = "auto",
    to_layout: Annotated[
        str | None, typer.Option(help="Of the one that gets it; the same by default.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Element type of the KV cache: auto, float32, bfloat16, fp8, ...")
    ] = "auto",
    kv: Annotated[
        str, typer.Option(help="K and V of a head and token packed, or apart on pages of their own.")
    ] = "packed",
    mtp: Annotated[bool, typer.Option("--mtp", help="With the multi-token prediction layers.")] = False,
    strategy: Annotated[
        str, typer.Option(help="auto for the cheapest, or direct, over-read, staged.")
    ] = "auto",
    bandwidth: Annotated[
        float | None, typer.Option(help="GB/s that the link of a rank has, if less than memory.")
    ] = None,
    costs: Annotated[
        str | None,
        typer.Option(help="File of kvferry bench calibrate; this machine's by default, else built-in costs."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, in bytes and seconds.")] = False,
    html: Annotated[Path | None, typer.Option(help="File for a picture of what goes where.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="Print the table of models, with sources.")] = False,
) -> None:
    """Say what handing MODEL's KV cache from one engine to another takes: bytes, pieces, time.

    No engine runs and no weights are read: the memory of both engines is laid out as vLLM would, and the
    planner of real transfers works on it, with block tables as scattered as on a busy engine.
    """
    if listed:
        _print_table()
        return
    if model is None:
        raise ConfigError(
            "MODEL is missing: a config.json, its folder, or a name that `kvferry plan --list` has"
        )
    if tokens < 1:
        raise ConfigError(f"--tokens is {tokens}; a prompt has at least 1")
    if kv not in ("packed", "apart"):
        raise ConfigError(f"--kv {kv} is not known; choose packed or apart")
    from kvferry.geometry.models import read_model
    from kvferry.plan.cost import Pricing, link, pinned
    from kvferry.plan.find import find_config
    from kvferry.plan.forecast import forecast
    from kvferry.plan.side import Side, layout_of
    from kvferry.transport.costs import costs_of

    name, config = find_config(model)
    reading = read_model(config, dtype, name=name, draft=mtp)
    source = Side(tp, pp, layout_of(layout, reading), block_size)
    to = layout_of(to_layout, reading) if to_layout else None
    destination = replace(source, **given(tp=to_tp, pp=to_pp, layout=to, block_tokens=to_block_size))
    pricing, separate = Pricing(link(costs_of(costs), bandwidth), pinned(strategy)), kv == "apart"
    made = forecast(reading, (source, destination), tokens, pricing, separate=separate)
    if html is not None:
        _draw(html, made, reading, separate=separate)
    if as_json:
        _print_json(made)
    else:
        _print(made)


def _print_table() -> None:
    from rich.console import Console

    from kvferry.plan.show import show_table

    show_table(Console(highlight=False))


def _print(made: Forecast) -> None:
    from rich.console import Console

    from kvferry.plan.show import show

    show(made, Console(highlight=False))


def _print_json(made: Forecast) -> None:
    from kvferry.plan.numbers import as_json

    print(json.dumps(as_json(made)))


def _draw(path: Path, made: Forecast, reading: ModelReading, *, separate: bool) -> None:
    from kvferry.plan.page import picture

    write(path, picture(made, reading, separate=separate))
