"""`python -m benchmarks accuracy`."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvferry.errors import ConfigError, KVFerryError

if TYPE_CHECKING:
    from rich.console import Console

    from benchmarks.accuracy.comparison import Results

_FAILED = 1
_INTERRUPTED = 130


def accuracy(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Path or id of a model that vLLM can load.")],
    vllm_args: Annotated[
        list[str] | None, typer.Argument(metavar="-- VLLM_ARGS", help="Arguments for every engine.")
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON lines with question and answer, as in GSM8K; by default GSM8K, which is downloaded.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="COUNT", min=1, help="Ask only the first questions.")
    ] = None,
    concurrency: Annotated[
        int, typer.Option(metavar="COUNT", min=1, help="Questions to ask at the same time.")
    ] = 8,
    min_same: Annotated[
        float,
        typer.Option(
            metavar="SHARE", min=0, max=1, help="Share of answers that must be the same text, 0 to 1."
        ),
    ] = 0,
    ways: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Ways to move KV, separated by commas: pair; blocks (of 64 and 128 tokens); tiers (files, "
            "after a restart); spoiled (KV is zeroed, so answers must change).",
        ),
    ] = "pair",
    prefill_tp: Annotated[
        int, typer.Option(metavar="COUNT", help="Tensor-parallel ranks of the prefill engine.")
    ] = 1,
    decode_tp: Annotated[
        int, typer.Option(metavar="COUNT", help="Tensor-parallel ranks of the other two engines.")
    ] = 1,
    lm_eval: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Environment with lm-eval; by default that of `make accuracy`."),
    ] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Keep logs and lm-eval's results there; by default only after a failure."
        ),
    ] = None,
    startup_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="Time for the engines to become ready.")
    ] = 600,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare answers from KV that moved with a single engine's.

    lm-eval asks the questions of GSM8K, and scores the answers. The exit code is 1 if the scores differ by
    more than their standard error, if too few answers are the same text, or if no KV was moved.
    """
    from rich.console import Console

    from benchmarks.accuracy import report
    from kvferry.serving.signals import StopRequested
    from kvferry.serving.temporary import temporary_folder

    folder = log_dir or temporary_folder("kvferry-accuracy-")
    console = Console(stderr=True)
    try:
        found = _measure(
            model,
            vllm_args or [],
            folder,
            console,
            questions=questions,
            limit=limit,
            concurrency=concurrency,
            ways=ways,
            least_same=min_same,
            parallel=(prefill_tp, decode_tp),
            lm_eval=lm_eval,
            startup_timeout=startup_timeout,
        )
    except (StopRequested, KeyboardInterrupt):
        _remove(folder, log_dir)
        raise typer.Exit(_INTERRUPTED) from None
    except ConfigError:
        _remove(folder, log_dir)
        raise
    except KVFerryError:
        console.print(f"Logs and results are kept in {folder}.", highlight=False, soft_wrap=True)
        raise
    if as_json:
        print(json.dumps(report.as_json(found)))
    else:
        report.show(found, Console(highlight=False))
    if found.failures:
        console.print(f"Logs and results are kept in {folder}.", highlight=False, soft_wrap=True)
        raise typer.Exit(_FAILED)
    _remove(folder, log_dir)


def _measure(
    model: str,
    arguments: list[str],
    folder: Path,
    console: Console,
    *,
    questions: Path | None,
    limit: int | None,
    concurrency: int,
    ways: str,
    least_same: float,
    parallel: tuple[int, int],
    lm_eval: Path | None,
    startup_timeout: float,
) -> Results:
    """Check all options, then start the engines and compare them."""
    from benchmarks.accuracy.harness import Task, find_harness
    from benchmarks.accuracy.measure import Run
    from benchmarks.accuracy.questions import read_questions
    from benchmarks.accuracy.ways import read_ways
    from kvferry.serving.launch import fleet_specs
    from kvferry.serving.signals import StopSignals

    chosen = read_ways(ways)
    harness = find_harness(lm_eval)
    task = Task(questions=questions, limit=limit, concurrency=concurrency)
    if questions is not None:
        # A token has a character at least.
        task = replace(task, answer_tokens=max(map(len, read_questions(questions))))
    specs = fleet_specs(
        model, prefill_tensor_parallel=parallel[0], decode_tensor_parallel=parallel[1], arguments=arguments
    )
    with StopSignals() as signals:
        run = Run(
            harness=harness,
            task=task,
            folder=folder,
            console=console,
            signals=signals,
            startup_timeout_seconds=startup_timeout,
        )
        return run.compare(specs, chosen, least_same=least_same)


def _remove(folder: Path, log_dir: Path | None) -> None:
    if log_dir is None:
        shutil.rmtree(folder, ignore_errors=True)
