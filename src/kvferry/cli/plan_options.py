"""The options of `kvferry plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from kvferry.cli.options import count_option

Model: TypeAlias = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help="A config.json, its folder, a name that --list prints, or a Hugging Face id."
    ),
]
Tokens: TypeAlias = Annotated[int, count_option("Tokens of the prompt to transfer.")]
Tp: TypeAlias = Annotated[
    int, typer.Option(metavar="RANKS", help="Tensor-parallel ranks of the sending engine.")
]
ToTp: TypeAlias = Annotated[
    int | None,
    typer.Option(metavar="RANKS", help="Tensor-parallel ranks of the receiving engine; by default as --tp."),
]
Pp: TypeAlias = Annotated[
    int, typer.Option(metavar="RANKS", help="Pipeline-parallel ranks of the sending engine.")
]
ToPp: TypeAlias = Annotated[
    int | None,
    typer.Option(
        metavar="RANKS", help="Pipeline-parallel ranks of the receiving engine; by default as --pp."
    ),
]
BlockSize: TypeAlias = Annotated[
    int | None,
    count_option("Tokens per block of the sending engine; by default vLLM's choice."),
]
ToBlockSize: TypeAlias = Annotated[
    int | None,
    count_option("Tokens per block of the receiving engine; by default as --block-size."),
]
Layout: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Layout of the sending engine: auto, LBNHC (NHD), LBHNC (HND), LHBNC, BLHNC, BLNHC, BHLNC.",
    ),
]
ToLayout: TypeAlias = Annotated[
    str | None, typer.Option(metavar="NAME", help="Layout of the receiving engine; by default as --layout.")
]
Backend: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Attention backend of the sending engine, e.g. FLASHINFER; by default vLLM's choice on CUDA.",
    ),
]
ToBackend: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Attention backend of the receiving engine; by default as --backend."),
]
Dtype: TypeAlias = Annotated[
    str, typer.Option(metavar="NAME", help="Element type of the KV cache: auto, float32, bfloat16, fp8, ...")
]
Planes: TypeAlias = Annotated[
    str,
    typer.Option(metavar="NAME", help="packed: a page holds K and V; apart: K and V have separate pages."),
]
Mtp: TypeAlias = Annotated[bool, typer.Option("--mtp", help="Include the multi-token prediction layers.")]
StrategyName: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="Transfer strategy: auto for the cheapest, direct, over-read, staged or shared."
    ),
]
OneMachine: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--one-machine", help="Both engines run on one machine, and can share host memory (strategy shared)."
    ),
]
Bandwidth: TypeAlias = Annotated[
    float | None,
    typer.Option(metavar="GB/S", help="Bandwidth of a rank's network link in GB/s; by default unlimited."),
]
CostsFile: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="File that `kvferry doctor --calibrate` wrote; by default this machine's, else built-in costs.",
    ),
]
StepTokens: TypeAlias = Annotated[int, count_option("For the tiers: the engine's --max-num-batched-tokens.")]
Retention: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="COUNT",
        help="For the tiers: the engine's --prefix-cache-retention-interval, a number of tokens or None.",
    ),
]
ChunkTokens: TypeAlias = Annotated[
    int | None,
    count_option("For the tiers: tokens per chunk; by default the connector's choice."),
]
SnapshotTokens: TypeAlias = Annotated[
    int | None,
    count_option("For the tiers: tokens between snapshots; by default as many as in a chunk."),
]
FirstSnapshot: TypeAlias = Annotated[
    int | None,
    count_option(
        "First position of a snapshot for shared prefixes, 0 for none; by default the connector's.",
    ),
]
KeptTokens: TypeAlias = Annotated[int, count_option("For the tiers: tokens of the prompt to store.")]
TraceFile: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="TRACE",
        help="Trace as for `kvferry replay`: adds the hit rate by host memory to --html and --json.",
    ),
]
KVCacheMemory: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="For --trace: memory of a rank for KV cache; by default 40GiB."),
]
UnitTokens: TypeAlias = Annotated[
    int | None,
    count_option("Tokens per unit of the trace, where the trace does not say it."),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON, in bytes and seconds.")]
Html: TypeAlias = Annotated[
    Path | None, typer.Option(metavar="FILE", help="HTML file to write, with a picture of the transfer.")
]
Listed: TypeAlias = Annotated[bool, typer.Option("--list", help="Print the table of models, with sources.")]
