"""The options of `kvferry plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

Model: TypeAlias = Annotated[
    str | None, typer.Argument(help="A config.json, its folder, a name that --list has, or a hub id.")
]
Tokens: TypeAlias = Annotated[int, typer.Option(help="Tokens of the prompt to transfer.")]
Tp: TypeAlias = Annotated[int, typer.Option(help="Tensor-parallel ranks of the sending engine.")]
ToTp: TypeAlias = Annotated[int | None, typer.Option(help="The same of the receiving engine.")]
Pp: TypeAlias = Annotated[int, typer.Option(help="Pipeline ranks of the sending engine.")]
ToPp: TypeAlias = Annotated[int | None, typer.Option(help="The same of the receiving engine.")]
BlockSize: TypeAlias = Annotated[
    int | None, typer.Option(help="Tokens per block of the sending engine; by default vLLM's choice.")
]
ToBlockSize: TypeAlias = Annotated[
    int | None, typer.Option(help="The same of the receiving engine; by default as --block-size.")
]
Layout: TypeAlias = Annotated[
    str,
    typer.Option(help="Memory layout: auto, LBNHC (NHD), LBHNC (HND), LHBNC, BLHNC, BLNHC, BHLNC."),
]
ToLayout: TypeAlias = Annotated[
    str | None, typer.Option(help="The same of the receiving engine; by default as --layout.")
]
Dtype: TypeAlias = Annotated[
    str, typer.Option(help="Element type of the KV cache: auto, float32, bfloat16, fp8, ...")
]
Planes: TypeAlias = Annotated[
    str, typer.Option(help="K and V of a token packed together, or apart on pages of their own.")
]
Mtp: TypeAlias = Annotated[bool, typer.Option("--mtp", help="Include the multi-token prediction layers.")]
StrategyName: TypeAlias = Annotated[
    str, typer.Option(help="How bytes travel: auto for the cheapest, direct, over-read or staged.")
]
Bandwidth: TypeAlias = Annotated[
    float | None, typer.Option(help="GB/s of a rank's link, if less than memory bandwidth.")
]
CostsFile: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="File that `kvferry bench calibrate` wrote; by default this machine's, else built-in costs."
    ),
]
StepTokens: TypeAlias = Annotated[int, typer.Option(help="Tiers: the engine's --max-num-batched-tokens.")]
Retention: TypeAlias = Annotated[
    str,
    typer.Option(help="Tiers: its --prefix-cache-retention-interval: 0, tokens or None."),
]
ChunkTokens: TypeAlias = Annotated[
    int | None, typer.Option(help="Tiers: the connector's chunk_tokens; by default its choice.")
]
SnapshotTokens: TypeAlias = Annotated[
    int | None, typer.Option(help="Tiers: the connector's snapshot_tokens; by default a chunk's.")
]
KeptTokens: TypeAlias = Annotated[int, typer.Option(help="Tiers: tokens of the prompt to keep.")]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON, in bytes and seconds.")]
Html: TypeAlias = Annotated[
    Path | None, typer.Option(help="HTML file to write with a picture of the transfer.")
]
Listed: TypeAlias = Annotated[bool, typer.Option("--list", help="Print the table of models, with sources.")]
