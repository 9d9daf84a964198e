"""`kvferry demo`: move hybrid KV cache between two engines, and show it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvferry.cli.options import count_option
from kvferry.cli.output import INTERRUPTED, check_output
from kvferry.errors import ConfigError, KVFerryError
from kvferry.extras import VLLM, require
from kvferry.operating_system import require_linux

if TYPE_CHECKING:
    from kvferry.serving.demo import DemoModel, Screen
    from kvferry.serving.signals import StopSignals

_FAMILIES = "smollm2,gemma3,nemotronh"
_FAILED = 1


def demo(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="Path or id of a model that vLLM can load; by default those of --families."
        ),
    ] = None,
    vllm_args: Annotated[
        list[str] | None, typer.Argument(metavar="-- VLLM_ARGS", help="Arguments for both engines.")
    ] = None,
    families: Annotated[
        str, typer.Option(metavar="NAMES", help="Small and tiny models to run, separated by commas.")
    ] = _FAMILIES,
    prompts: Annotated[int, typer.Option(metavar="COUNT", min=1, max=64, help="Requests per model.")] = 4,
    answer_tokens: Annotated[int, count_option("Tokens per answer.", least=1, most=1024)] = 24,
    log_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep the engines' logs there; by default only after a failure."),
    ] = None,
) -> None:
    """Send prompts through two engines, and show what moved.

    A prefill and a decode engine serve the model. The end says what happened, with one row per request: what
    moved, how long that took, and whether the answer equals a single engine's.
    """
    require_linux("kvferry demo")
    require("kvferry demo", VLLM)
    from rich.console import Console

    from kvferry.engines.vllm.version import check_release, vllm_version
    from kvferry.serving.demo import AnswerVerdict, Screen, measure
    from kvferry.serving.signals import StopRequested, StopSignals
    from kvferry.serving.temporary import temporary_folder
    from kvferry.terminal import output_width

    check_release(vllm_version())
    check_output()
    screen = Screen(Console(highlight=False), output_width())
    folder = log_dir or temporary_folder("kvferry-demo-")
    verdicts: list[AnswerVerdict] = []
    try:
        with StopSignals() as signals:
            for number, served in enumerate(_models(model, families, vllm_args or [], screen, signals)):
                verdicts += measure(
                    served,
                    folder / str(number),
                    screen,
                    signals,
                    count=prompts,
                    answer_tokens=answer_tokens,
                )
    except (StopRequested, KeyboardInterrupt):
        _remove_logs(folder, log_dir)
        screen.note("\nkvferry: stopped; nothing of the demo is left running")
        raise typer.Exit(INTERRUPTED) from None
    except ConfigError:
        _remove_logs(folder, log_dir)
        raise
    except KVFerryError:
        screen.note(f"\nThe engines' logs are kept in {folder}.")
        raise
    if AnswerVerdict.NO in verdicts:
        screen.note(f"\nAnswers differ from a single engine's. The engines' logs are kept in {folder}.")
        raise typer.Exit(_FAILED)
    _remove_logs(folder, log_dir)


def _models(
    model: str | None, families: str, arguments: list[str], screen: Screen, signals: StopSignals
) -> Iterator[DemoModel]:
    """Yield the models to serve: the given model, or the model of each family.

    Args:
        model: path or id of a model; None for the models of `families`. A value that begins with ``-`` is
            treated as the first of `arguments`.
        families: names of model families, separated by commas. SmolLM2 is left out of the default ones if it
            was not fetched.
        arguments: additional arguments of vLLM's API server.
        screen: output for the user.
        signals: handler of Ctrl-C and SIGTERM. These signals interrupt the writing of checkpoints.

    Raises:
        ConfigError: both a model and families are given, a family is unknown, or SmolLM2 was not fetched.
    """
    from kvferry.serving.demo import DemoModel, chat_model, family_model
    from kvferry.serving.model_name import check_model
    from kvferry.serving.smollm2 import SMOLLM2, missing_smollm2

    if model is not None and model.startswith("-"):
        # `kvferry demo -- --flag`: no model is given, and all arguments are for vLLM.
        arguments, model = [model, *arguments], None
    if model is not None:
        if families != _FAMILIES:
            raise ConfigError("both MODEL and --families are given; give one of them")
        check_model(model)
        yield DemoModel(model, model, tuple(arguments))
        return
    names = [name.strip() for name in families.split(",")]
    if SMOLLM2 in names and (missing := missing_smollm2()):
        if families != _FAMILIES:
            raise ConfigError(missing)
        screen.note(f"Without real weights: {missing}.")
        names.remove(SMOLLM2)
    screen.note("Tiny random checkpoints: writing those not kept from before ...")
    with signals.interruptible():
        models = [
            chat_model(arguments) if name == SMOLLM2 else family_model(name, arguments) for name in names
        ]
    yield from models


def _remove_logs(folder: Path, log_dir: Path | None) -> None:
    if log_dir is None:
        shutil.rmtree(folder, ignore_errors=True)
