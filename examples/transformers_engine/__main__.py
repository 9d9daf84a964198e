"""The commands of `python -m examples.transformers_engine`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import httpx
import torch
import typer
from transformers.utils import logging

from examples.transformers_engine.engine import Engine
from examples.transformers_engine.handover import compare
from examples.transformers_engine.tiers import ANSWER_TOKENS, demonstrate, prompt
from kvferry.tools.serving.tiny import tiny_checkpoint
from kvferry.tools.serving.tiny.checkpoint import cache_directory

_PATIENCE_SECONDS = 120.0

app = typer.Typer(
    name="python -m examples.transformers_engine",
    help="An engine over transformers that uses kvferry's connector without vLLM.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


@app.command()
def checkpoint() -> None:
    """Write the checkpoint of a tiny Gemma 3 model unless it exists, and print its folder."""
    typer.echo(_checkpoint())


@app.command()
def tiers() -> None:
    """Store a prompt's KV in one process, and continue the prompt in other processes."""
    with tempfile.TemporaryDirectory(prefix="kvferry-example-") as directory:
        as_expected = demonstrate(_checkpoint(), Path(directory))
    raise typer.Exit(int(not as_expected))


@app.command()
def handover(
    url: Annotated[str, typer.Argument(help="Base URL of the vLLM server.")],
    model: Annotated[
        Path | None, typer.Argument(help="Checkpoint that it serves; by default the tiny Gemma 3.")
    ] = None,
) -> None:
    """Exchange the KV of a prompt with a vLLM server in both directions, and compare the answers."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    folder = model or _checkpoint()
    engine = Engine(folder, {})
    try:
        with httpx.Client(base_url=url, timeout=_PATIENCE_SECONDS) as client:
            same = compare(client, engine, prompt(folder), ANSWER_TOKENS)
    finally:
        engine.close()
    raise typer.Exit(int(not same))


def _checkpoint() -> Path:
    return tiny_checkpoint("gemma3", cache_directory())


if __name__ == "__main__":
    app()
