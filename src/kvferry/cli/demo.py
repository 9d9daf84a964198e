"""`kvferry demo`: see hybrid KV cache move between two engines."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvferry.errors import ConfigError

if TYPE_CHECKING:
    from kvferry.serving.demo import DemoModel, Screen

_FAMILIES = "gemma3,nemotronh"


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command(context_settings={"allow_extra_args": True})(demo)


def demo(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="Path or id of any model that vLLM can load; by default tiny ones.")
    ] = None,
    families: Annotated[str, typer.Option(help="Which tiny models, one after the other.")] = _FAMILIES,
    prompts: Annotated[int, typer.Option(min=1, max=64, help="Requests per model.")] = 4,
    answer_tokens: Annotated[int, typer.Option(min=1, max=1024, help="Length of each answer.")] = 24,
    log_dir: Annotated[
        Path | None, typer.Option(help="Keep the engines' logs there; by default only those of a failed run.")
    ] = None,
) -> None:
    """Serve a model with a prefill and a decode engine, send it real text, and show what moved.

    Ends with a table: per request what moved for each KV cache group, how long it took, and whether the answer is
    identical to a single engine's. Arguments after -- go to vLLM.
    """
    from rich.console import Console

    from kvferry.serving.demo import Screen, Verdict, measure

    screen = Screen(Console())
    folder = log_dir or Path(tempfile.mkdtemp(prefix="kvferry-demo-"))
    verdicts = []
    try:
        for served in _models(model, families, context.args, screen):
            logs = folder / served.title.partition(":")[0].replace("/", "_")
            verdicts += measure(served, logs, screen, count=prompts, answer_tokens=answer_tokens)
    except KeyboardInterrupt:
        _drop(folder, log_dir)
        raise
    if Verdict.NO in verdicts:
        screen.note(f"Answers differ from a single engine's; the engines' logs are in {folder}.")
        raise typer.Exit(1)
    _drop(folder, log_dir)


def _models(model: str | None, families: str, arguments: list[str], screen: Screen) -> Iterator[DemoModel]:
    from kvferry.serving.demo import DemoModel, family_model

    if model is not None:
        if families != _FAMILIES:
            raise ConfigError("both MODEL and --families are given; give one of them")
        yield DemoModel(model, model, tuple(arguments))
        return
    names = [name.strip() for name in families.split(",")]
    screen.note("Tiny random checkpoints of real architectures: writing those not kept from before ...")
    yield from [family_model(name, arguments) for name in names]


def _drop(folder: Path, log_dir: Path | None) -> None:
    if log_dir is None:
        shutil.rmtree(folder, ignore_errors=True)
