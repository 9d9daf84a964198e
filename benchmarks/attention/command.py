"""`python -m benchmarks attention`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from kvferry.common.errors import ConfigError
from kvferry.tools.cli.bench import progress_line

_KERNEL_BLOCK_TOKENS = 32


def attention(
    requests: Annotated[int, typer.Option(min=1, help="Requests that decode at once.")] = 32,
    context: Annotated[int, typer.Option(min=2, help="Tokens of each of their prompts.")] = 1000,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps of each round.")] = 20,
    prompt: Annotated[
        int, typer.Option(min=2, help="Tokens of the prompt that is computed and handed over.")
    ] = 2048,
    block_size: Annotated[int, typer.Option(help="Tokens per block, a multiple of 32.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to count.")] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: all rounds, in seconds.")] = False,
) -> None:
    """Compare engines whose KV cache is per layer or cross-layer.

    Measures decode steps, prefills, and hand-overs with kvferry. Each layout has two vLLM engines of its own;
    the engines that wait are paused. All must give the same tokens.
    """
    from rich.console import Console

    from benchmarks.attention import report
    from benchmarks.attention.measure import AttentionJob, measure

    if block_size < 1 or block_size % _KERNEL_BLOCK_TOKENS:
        raise ConfigError(
            f"--block-size is {block_size}, but vLLM's CPU kernels need a multiple of {_KERNEL_BLOCK_TOKENS}"
        )
    job = AttentionJob(
        requests=requests,
        context=context,
        steps=steps,
        prompt=prompt,
        block_tokens=block_size,
        rounds=rounds,
    )
    with tempfile.TemporaryDirectory() as folder, progress_line() as progress:
        found = measure(job, folder=Path(folder), progress=progress)
    if as_json:
        print(json.dumps(report.as_json(job, found)))
    else:
        report.show(job, found, Console(highlight=False))
