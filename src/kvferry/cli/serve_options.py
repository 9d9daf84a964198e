"""The options of `kvferry serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from kvferry.cli.options import count_option
from kvferry.serving.role import Role

Model: TypeAlias = Annotated[
    str, typer.Argument(metavar="MODEL", help="Path or id of a model that vLLM can load.")
]
VllmArgs: TypeAlias = Annotated[
    list[str] | None, typer.Argument(metavar="-- VLLM_ARGS", help="Arguments for every engine.")
]
RoleName: TypeAlias = Annotated[
    Role | None,
    typer.Option(help="both for engines that serve alone; by default prefill and decode engines."),
]
Engines: TypeAlias = Annotated[int | None, count_option("Number of engines, with --role both; by default 1.")]
Prefill: TypeAlias = Annotated[int | None, count_option("Number of prefill engines; by default 1.")]
Decode: TypeAlias = Annotated[int | None, count_option("Number of decode engines; by default 1.")]
Tp: TypeAlias = Annotated[int, count_option("Tensor-parallel ranks of each engine.")]
PrefillTp: TypeAlias = Annotated[int | None, count_option("The same for prefill engines; by default --tp.")]
DecodeTp: TypeAlias = Annotated[int | None, count_option("The same for decode engines; by default --tp.")]
PrefillArgs: TypeAlias = Annotated[
    str, typer.Option(metavar="TEXT", help="More arguments for prefill engines, as in a shell.")
]
DecodeArgs: TypeAlias = Annotated[
    str, typer.Option(metavar="TEXT", help="More arguments for decode engines, as in a shell.")
]
Tiers: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="JSON", help='Tiers of every engine: default, or JSON: [{"type": "host"}, ...].'),
]
Host: TypeAlias = Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")]
Port: TypeAlias = Annotated[
    int, typer.Option(metavar="PORT", min=0, max=65535, help="Port to listen on; 0 for any.")
]
TurnSeconds: TypeAlias = Annotated[
    float,
    typer.Option(metavar="SECONDS", help="Time that decode engines keep an answer's KV for the next turn."),
]
LogDir: TypeAlias = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder for the engines' logs; by default a temporary one."),
]
StartupTimeout: TypeAlias = Annotated[
    float, typer.Option(metavar="SECONDS", min=1, help="Time for all engines to become ready.")
]
MaxRestarts: TypeAlias = Annotated[
    int,
    typer.Option(metavar="COUNT", min=0, help="Restarts in a row of an engine that ends; 0 for none."),
]
