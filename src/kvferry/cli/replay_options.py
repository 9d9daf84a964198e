"""The options of `kvferry replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from kvferry.cli.options import count_option

Model: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="MODEL", help="A config.json, its folder, a name of `kvferry plan --list`, or an id."
    ),
]
EngineBlocks: TypeAlias = Annotated[
    int | None,
    count_option("Blocks in an engine's pool, 0 for no prefix cache; by default the recorded engine's."),
]
KVCacheMemory: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory of a rank for KV cache; by default as in the recorded engine, else 40GiB.",
    ),
]
Tiers: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--tier",
        metavar="KIND=SIZE",
        help="A tier: host=64GiB, file=2TiB, file=2TiB:shared, object=unlimited. Repeatable, fastest first. "
        "With --target-hit, host memory in front of the disk; by default 1/16 of the disk.",
    ),
]
Policy: TypeAlias = Annotated[
    str, typer.Option(metavar="NAME", help="Eviction policy of host memory: lru, arc or s3fifo.")
]
PrefillSpeed: TypeAlias = Annotated[
    float,
    typer.Option(
        metavar="COUNT",
        help="Tokens that an engine computes per second; 0 to leave time out.",
    ),
]
Bandwidth: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KIND=GB/S", help="Speed of loads from a kind of tier in GB/s, as in file=6. Repeatable."
    ),
]
Engines: TypeAlias = Annotated[int, count_option("Number of engines.")]
RouteOption: TypeAlias = Annotated[
    str,
    typer.Option(metavar="NAME", help="Choice of the engine for a request: prefix, random or session."),
]
Tp: TypeAlias = Annotated[int, typer.Option(metavar="RANKS", help="Tensor-parallel ranks of an engine.")]
BlockSize: TypeAlias = Annotated[int | None, count_option("Tokens per block; by default vLLM's choice.")]
Dtype: TypeAlias = Annotated[
    str, typer.Option(metavar="NAME", help="Element type of the KV cache: auto, float32, bfloat16, fp8, ...")
]
StepTokens: TypeAlias = Annotated[
    int | None,
    count_option("The engine's --max-num-batched-tokens; by default the recorded one's, else 8192."),
]
Retention: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="COUNT",
        help="The engine's --prefix-cache-retention-interval, a number of tokens or None.",
    ),
]
ChunkTokens: TypeAlias = Annotated[
    int | None, count_option("Tokens per chunk; by default the connector's choice.")
]
SnapshotTokens: TypeAlias = Annotated[
    int | None,
    count_option("Tokens between snapshots; by default as many as in a chunk."),
]
UnitTokens: TypeAlias = Annotated[
    int | None,
    count_option("Tokens per unit of the trace, where the trace does not say it."),
]
Skip: TypeAlias = Annotated[int, count_option("Requests at the start that are replayed but not counted.")]
Seed: TypeAlias = Annotated[int, typer.Option(metavar="NUMBER", help="Seed of random choices.")]
TargetHit: TypeAlias = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="Instead find the memory or disk of one engine that saves this share of the prompt tokens.",
    ),
]
DiskWrites: TypeAlias = Annotated[
    float | None,
    typer.Option(
        metavar="COUNT",
        help="With --target-hit: full writes per day that the disk endures for five years; by default 1.",
    ),
]
Curve: TypeAlias = Annotated[
    bool, typer.Option("--curve", help="Also compute the hit rate by capacity of host memory.")
]
Requests: TypeAlias = Annotated[
    Path | None, typer.Option(metavar="FILE", help="File to write, with what was found for each request.")
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON, in bytes, seconds and tokens.")]
Html: TypeAlias = Annotated[
    Path | None, typer.Option(metavar="FILE", help="HTML file to write, with the curve as a picture.")
]
