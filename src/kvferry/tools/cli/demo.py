"""`kvferry demo`: move hybrid KV cache between two engines, and show it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvferry.common.errors import ConfigError, KVFerryError
from kvferry.common.machine import require_linux
from kvferry.tools.cli.options import INTERRUPTED, argument, check_output, command, count, option
from kvferry.tools.extras import VLLM, require

if TYPE_CHECKING:
    from kvferry.tools.serving.demo import DemoModel, Screen
    from kvferry.tools.serving.processes import StopSignals

# Sliding windows, recurrent state, and a model with real weights, whose answers a reader can judge.
_FAMILIES = "smollm2,gemma3,nemotronh"
_FAILED = 1


@dataclass(frozen=True)
class DemoOptions:
    """The options of `kvferry demo`."""

    model: str | None = argument(
        "MODEL", "Path or id of a model that vLLM can load; by default those of --families.", None
    )
    vllm_args: list[str] | None = argument("-- VLLM_ARGS", "Arguments for both engines.", None)
    families: str = option(_FAMILIES, "NAMES", "Small and tiny models to run, separated by commas.")
    prompts: int = option(4, "COUNT", "Requests per model.", min=1, max=64)
    answer_tokens: int = count(24, "Tokens per answer.", least=1, most=1024)
    log_dir: Path | None = option(
        None, "DIR", "Keep the engines' logs there; by default only after a failure."
    )


@command
def demo(options: DemoOptions) -> None:
    """Send prompts through two engines, and show what moved.

    A prefill and a decode engine serve the model. The end says what happened, with one row per request: what
    moved, how long that took, and whether the answer equals a single engine's.
    """
    require_linux("kvferry demo")
    require("kvferry demo", VLLM)
    from rich.console import Console

    from kvferry.engines.vllm import check_release, vllm_version
    from kvferry.tools.report import output_width
    from kvferry.tools.serving.demo import AnswerVerdict, Screen, measure
    from kvferry.tools.serving.processes import StopRequested, StopSignals, temporary_folder

    check_release(vllm_version())
    check_output()
    screen = Screen(Console(highlight=False), output_width())
    log_dir = options.log_dir
    folder = log_dir or temporary_folder("kvferry-demo-")
    verdicts: list[AnswerVerdict] = []
    try:
        with StopSignals() as signals:
            for number, served in enumerate(_models(options, screen, signals)):
                verdicts += measure(
                    served,
                    folder / str(number),
                    screen,
                    signals,
                    count=options.prompts,
                    answer_tokens=options.answer_tokens,
                )
    except (StopRequested, KeyboardInterrupt):
        _remove_logs(folder, log_dir)
        screen.note("\nkvferry: stopped; nothing of the demo is left running")
        raise typer.Exit(INTERRUPTED) from None
    except ConfigError:  # its message says all that a log would
        _remove_logs(folder, log_dir)
        raise
    except KVFerryError:
        screen.note(f"\nThe engines' logs are kept in {folder}.")
        raise
    if AnswerVerdict.NO in verdicts:
        screen.note(f"\nAnswers differ from a single engine's. The engines' logs are kept in {folder}.")
        raise typer.Exit(_FAILED)
    _remove_logs(folder, log_dir)


def _models(options: DemoOptions, screen: Screen, signals: StopSignals) -> Iterator[DemoModel]:
    """Yield the given model, or that of each family; without SmolLM2 by default if it was not fetched.

    Signals interrupt the writing of checkpoints.

    Raises:
        ConfigError: both a model and families are given, a family is unknown, or SmolLM2 was not fetched.
    """
    from kvferry.tools.serving.demo import DemoModel, chat_model, family_model
    from kvferry.tools.serving.machine_checks import check_model
    from kvferry.tools.serving.smollm2 import SMOLLM2, missing_smollm2

    model, arguments, families = options.model, options.vllm_args or [], options.families
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
