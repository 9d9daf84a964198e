"""`python -m benchmarks overhead`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kvferry.cli.bench_options import BlockSize, Dtype, HeadDim, KvHeads, Layers, Transports, progress_line
from kvferry.cli.options import without_none


def overhead(
    geometry: Annotated[
        str, typer.Option(help="Model whose KV cache to plan and move, as `kvferry plan` takes it.")
    ] = "Llama-3.1-8B",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the request that is planned.")] = 131_072,
    moved: Annotated[int, typer.Option(min=1, help="Tokens that are under way while hooks run.")] = 4096,
    layers: Layers = None,
    kv_heads: KvHeads = None,
    head_dim: HeadDim = None,
    block_size: BlockSize = None,
    dtype: Dtype = "auto",
    repeats: Annotated[int, typer.Option(min=7, help="Rounds of planning and of getting ready.")] = 9,
    transports: Transports = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: all figures, in seconds.")] = False,
) -> None:
    """Measure what a request costs the decode side besides moving bytes.

    Planning a long request, getting ready for a peer with other block sizes, and the time inside an engine's
    hooks on every step while transfers run between two processes.
    """
    from rich.console import Console

    from benchmarks.overhead import report
    from benchmarks.overhead.measure import OverheadJob, measure
    from kvferry.measuring.simulated import read_geometry
    from kvferry.plan.side import EngineSide

    changes = without_none(num_hidden_layers=layers, num_key_value_heads=kv_heads, head_dim=head_dim)
    job = OverheadJob(
        reading=read_geometry(geometry, changes, dtype),
        side=EngineSide(block_tokens=block_size),
        planned_tokens=tokens,
        moved_tokens=moved,
        repeats=repeats,
        transports=transports,
    )
    with progress_line() as progress:
        measured = measure(job, progress)
    if as_json:
        print(json.dumps(report.as_json(measured)))
    else:
        report.show(measured, Console(highlight=False))
