"""`python -m benchmarks accuracy`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvferry.common.errors import ConfigError, KVFerryError

if TYPE_CHECKING:
    from rich.console import Console

    from benchmarks.accuracy.comparison import Results
    from benchmarks.accuracy.harness import Task
    from benchmarks.accuracy.subjects import Subject
    from benchmarks.accuracy.ways import MakeFleet

_FAILED = 1
_INTERRUPTED = 130

Models = Annotated[
    str,
    typer.Argument(
        metavar="MODELS",
        help="Paths or ids of models that vLLM can load, separated by commas, or smollm2, gemma3, lfm2, "
        "nemotronh and qwen3next, which come with questions.",
    ),
]
VllmArguments = Annotated[
    list[str] | None, typer.Argument(metavar="-- VLLM_ARGS", help="Arguments for every engine.")
]
Questions = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="JSON lines with question and answer, as in GSM8K; by default GSM8K, which is downloaded.",
    ),
]
Limit = Annotated[int | None, typer.Option(metavar="COUNT", min=1, help="Ask only the first questions.")]
Concurrency = Annotated[int, typer.Option(metavar="COUNT", min=1, help="Questions to ask at the same time.")]
LeastSame = Annotated[
    float,
    typer.Option(metavar="SHARE", min=0, max=1, help="Share of answers that must be the same text, 0 to 1."),
]
WayNames = Annotated[
    str,
    typer.Option(
        metavar="NAMES",
        help="Ways to move KV, separated by commas: pair; tp-2-1 and tp-1-2 (tensor-parallel ranks); blocks "
        "(of 64 and 128 tokens); tiers (files, after a restart); spoiled (loaded KV is zeroed, so answers "
        "must change), or spoiled-full, spoiled-window, spoiled-state (only of such layers).",
    ),
]
PrefillRanks = Annotated[
    int, typer.Option(metavar="COUNT", help="Tensor-parallel ranks of the prefill engine.")
]
DecodeRanks = Annotated[
    int, typer.Option(metavar="COUNT", help="Tensor-parallel ranks of the other two engines.")
]
Environment = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Environment with lm-eval; by default that of `make accuracy`."),
]
LogFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Keep logs and lm-eval's results there; by default only after a failure."
    ),
]
StartupTimeout = Annotated[
    float, typer.Option(metavar="SECONDS", min=1, help="Time for the engines to become ready.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options that hold for all models: those of the command, by their names there."""

    limit: int | None
    concurrency: int
    min_same: float
    ways: str
    prefill_tp: int
    decode_tp: int
    lm_eval: Path | None
    startup_timeout: float


def accuracy(
    models: Models,
    vllm_args: VllmArguments = None,
    questions: Questions = None,
    limit: Limit = None,
    concurrency: Concurrency = 8,
    min_same: LeastSame = 0,
    ways: WayNames = "pair",
    prefill_tp: PrefillRanks = 1,
    decode_tp: DecodeRanks = 1,
    lm_eval: Environment = None,
    log_dir: LogFolder = None,
    startup_timeout: StartupTimeout = 600,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare answers from KV that moved with a single engine's.

    lm-eval asks the questions of GSM8K, and scores the answers. The exit code is 1 if the scores differ by
    more than their standard error, if too few answers are the same text, or if no KV was moved.
    """
    from rich.console import Console

    from benchmarks.accuracy import report
    from benchmarks.accuracy.subjects import read_subjects

    options = Options(
        limit=limit,
        concurrency=concurrency,
        min_same=min_same,
        ways=ways,
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        lm_eval=lm_eval,
        startup_timeout=startup_timeout,
    )
    console = Console(stderr=True)
    with _log_folder(log_dir, console) as folder:
        found = _measure(read_subjects(models, questions, vllm_args or []), options, folder, console)
        if as_json:
            print(json.dumps({one.model: report.as_json(one) for one in found}))
        else:
            report.show_every(found, Console(highlight=False))
        if any(one.failures for one in found):
            raise typer.Exit(_FAILED)


@contextmanager
def _log_folder(log_dir: Path | None, console: Console) -> Iterator[Path]:
    """Yield the folder for logs and results. It is kept if it was named, and after a failure."""
    from kvferry.tools.serving.processes import StopRequested, temporary_folder

    folder, kept = log_dir or temporary_folder("kvferry-accuracy-"), log_dir is not None
    try:
        yield folder
    except (StopRequested, KeyboardInterrupt):
        raise typer.Exit(_INTERRUPTED) from None
    except ConfigError:
        raise
    except (KVFerryError, typer.Exit):
        kept = True
        console.print(f"Logs and results are kept in {folder}.", highlight=False, soft_wrap=True)
        raise
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)


def _measure(
    subjects: Sequence[Subject], options: Options, folder: Path, console: Console
) -> Sequence[Results]:
    """Check all options, then start the engines of each model and compare them."""
    from benchmarks.accuracy.harness import find_harness
    from benchmarks.accuracy.measure import Run
    from benchmarks.accuracy.ways import read_ways
    from kvferry.tools.serving.processes import StopSignals

    ways, harness = read_ways(options.ways), find_harness(options.lm_eval)
    found = []
    with StopSignals() as signals:
        for number, subject in enumerate(subjects):
            run = Run(
                harness=harness,
                task=_task(subject, options),
                folder=folder / f"model-{number}",
                console=console,
                signals=signals,
                startup_timeout_seconds=options.startup_timeout,
            )
            shown = [way for way in ways if subject.can_show(way)]
            found.append(
                run.compare(subject.name, _fleet(subject, options), shown, least_same=options.min_same)
            )
    return found


def _task(subject: Subject, options: Options) -> Task:
    from benchmarks.accuracy.harness import Task
    from benchmarks.accuracy.questions import read_questions

    task = partial(
        Task,
        questions=subject.questions,
        limit=options.limit,
        concurrency=options.concurrency,
        examples=subject.examples,
    )
    if subject.questions is None:
        return task()
    # A token has a character at least.
    return task(answer_tokens=max(map(len, read_questions(subject.questions))))


def _fleet(subject: Subject, options: Options) -> MakeFleet:
    from kvferry.tools.serving.launch import fleet_specs

    return partial(
        fleet_specs,
        subject.model,
        prefill_tensor_parallel=options.prefill_tp,
        decode_tensor_parallel=options.decode_tp,
        arguments=subject.arguments,
    )
