"""The options of `kvferry plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

Model: TypeAlias = Annotated[
    str | None, typer.Argument(help="A config.json, its folder, a name of the table, an id of the hub.")
]
Tokens: TypeAlias = Annotated[int, typer.Option(help="Tokens of the prompt that is handed over.")]
Tp: TypeAlias = Annotated[int, typer.Option(help="Tensor-parallel ranks of the engine that has it.")]
ToTp: TypeAlias = Annotated[int | None, typer.Option(help="Of the one that gets it; the same by default.")]
Pp: TypeAlias = Annotated[int, typer.Option(help="Pipeline ranks of the engine that has it.")]
ToPp: TypeAlias = Annotated[int | None, typer.Option(help="Of the one that gets it; the same by default.")]
BlockSize: TypeAlias = Annotated[
    int | None, typer.Option(help="Tokens of a block; vLLM's choice by default.")
]
ToBlockSize: TypeAlias = Annotated[
    int | None, typer.Option(help="Of the one that gets it; as --block-size by default.")
]
Layout: TypeAlias = Annotated[
    str,
    typer.Option(help="Axes of its memory: auto, LBNHC (NHD), LBHNC (HND), LHBNC, BLHNC, BLNHC, BHLNC."),
]
ToLayout: TypeAlias = Annotated[
    str | None, typer.Option(help="Of the one that gets it; the same by default.")
]
Dtype: TypeAlias = Annotated[
    str, typer.Option(help="Element type of the KV cache: auto, float32, bfloat16, fp8, ...")
]
Planes: TypeAlias = Annotated[
    str, typer.Option(help="K and V of a head and token packed, or apart on pages of their own.")
]
Mtp: TypeAlias = Annotated[bool, typer.Option("--mtp", help="With the multi-token prediction layers.")]
Way: TypeAlias = Annotated[str, typer.Option(help="auto for the cheapest, or direct, over-read, staged.")]
Bandwidth: TypeAlias = Annotated[
    float | None, typer.Option(help="GB/s that the link of a rank has, if less than memory.")
]
CostsFile: TypeAlias = Annotated[
    str | None,
    typer.Option(help="File of kvferry bench calibrate; this machine's by default, else built-in costs."),
]
StepTokens: TypeAlias = Annotated[int, typer.Option(help="Tiers: the engine's --max-num-batched-tokens.")]
Retention: TypeAlias = Annotated[
    str,
    typer.Option(help="Tiers: its --prefix-cache-retention-interval: 0, tokens or None."),
]
ChunkTokens: TypeAlias = Annotated[
    int | None, typer.Option(help="Tiers: of the connector; its choice by default.")
]
SnapshotTokens: TypeAlias = Annotated[
    int | None, typer.Option(help="Tiers: of the connector; a chunk's by default.")
]
KeptTokens: TypeAlias = Annotated[int, typer.Option(help="Tiers: tokens of the prompt that they keep.")]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON, in bytes and seconds.")]
Html: TypeAlias = Annotated[Path | None, typer.Option(help="File for a picture of what goes where.")]
Listed: TypeAlias = Annotated[bool, typer.Option("--list", help="Print the table of models, with sources.")]
