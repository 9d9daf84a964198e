"""`python -m benchmarks fleet`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kvferry.tools.cli.bench import progress_line, work_folder


def fleet(
    models: Annotated[
        str, typer.Option(help="Models of the chunks to read, separated by commas; empty for none.")
    ] = "Qwen3-0.6B,Llama-3.1-8B",
    chunks: Annotated[int, typer.Option(min=1, help="Chunks to read in each round.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to count.")] = 9,
    engines: Annotated[int, typer.Option(min=1, help="Engines in the directory.")] = 1000,
    directory: Annotated[
        int, typer.Option(min=0, help="Chunks in the directory; 0 for no directory.")
    ] = 1_000_000,
    prompts: Annotated[
        str,
        typer.Option(help="Lengths of prompts for two vLLM engines, separated by commas; empty for none."),
    ] = "512,2048,8192",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: all rounds, in seconds.")] = False,
) -> None:
    """Read chunks in another engine's host memory, and find them in a directory.

    Measures READs of chunks of 256 tokens between two processes, with their questions and digests, beside the
    same READs alone; look-ups in a Valkey server that is filled as by a large fleet; and the first token of
    prompts that another vLLM engine has in host memory, beside computing them.
    """
    from rich.console import Console

    from benchmarks.fleet import report
    from benchmarks.fleet.first_token import measure_first_tokens
    from benchmarks.fleet.measure import measure_directory, measure_reads

    with progress_line() as progress:
        reads = [measure_reads(model, 256, chunks, rounds, progress) for model in models.split(",") if model]
        tokens = []
        if prompts:
            with work_folder(None) as folder:
                lengths = [int(one) for one in prompts.split(",")]
                tokens = measure_first_tokens(lengths, rounds, folder, progress)
        found = measure_directory(engines, directory, (16, 128, 1024), 200, progress) if directory else None
    if as_json:
        print(json.dumps(report.as_json(reads, tokens, found)))
        return
    console = Console(highlight=False)
    if reads:
        report.show_reads(reads, console)
    if tokens:
        report.show_first_tokens(tokens, console)
    if found is not None:
        report.show_look_ups(found, console)
