"""Run lm-eval, which has an environment of its own, in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy.questions import EXAMPLES, GSM8K, write_task
from kvferry.common.errors import ConfigError, KVFerryError
from kvferry.tools.serving.engine import error_line

_GSM8K_FILE = "lib/python*/site-packages/lm_eval/tasks/gsm8k/gsm8k.yaml"
_DOWNLOAD = "import datasets; datasets.load_dataset('openai/gsm8k', 'main')"
_POLL_SECONDS = 0.2
_STOP_SECONDS = 10
# A large model on a CPU may take many minutes for one answer.
_REQUEST_SECONDS = 3600
_REFUSED = re.compile(r"API request failed.*?(?:Response text|error message): (.*?)\.? Retrying")
_MOST_CHARACTERS = 300


class HarnessError(KVFerryError):
    """Raised if lm-eval fails, or if its results are not in the expected format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The questions that lm-eval asks.

    Attributes:
        questions: file of questions; None for GSM8K.
        limit: number of questions to ask, the first ones; None for all.
        concurrency: number of questions that are asked at the same time.
        answer_tokens: length at which an answer ends, in tokens.
        examples: number of solved questions at the start of each prompt, if `questions` is a file.
    """

    questions: Path | None
    limit: int | None
    concurrency: int
    answer_tokens: int = 256
    examples: int = EXAMPLES


@dataclass(frozen=True, slots=True)
class Harness:
    """An installed lm-eval.

    Attributes:
        python: path of the Python of its environment.
        gsm8k: path of the file of its task GSM8K.
    """

    python: Path
    gsm8k: Path

    def check_dataset(self, log: Path, check: Callable[[], None]) -> None:
        """Download GSM8K, unless an earlier run has done so.

        Args:
            log: path of the file for the output.
            check: function that is called while the download runs. It may raise an exception.

        Raises:
            ConfigError: the questions cannot be downloaded.
        """
        try:
            self._run(["-c", _DOWNLOAD], log, check, {})
        except HarnessError as error:
            raise ConfigError(
                f"GSM8K cannot be downloaded from the Hugging Face hub ({reason(log)}); connect this "
                "machine, or name a file of questions with --questions"
            ) from error

    def evaluate(self, task: Task, url: str, model: str, folder: Path, check: Callable[[], None]) -> str:
        """Ask the questions of a task, write lm-eval's results to a folder, and return the task's name.

        Args:
            task: questions to ask.
            url: base URL of an OpenAI endpoint.
            model: name of the served model.
            folder: existing folder for the results, the settings and the output of lm-eval.
            check: function that is called while lm-eval runs. It may raise an exception.

        Raises:
            HarnessError: lm-eval failed.
        """
        name = (
            GSM8K
            if task.questions is None
            else write_task(task.questions, self.gsm8k, folder, examples=task.examples)
        )
        settings = folder / "run.yaml"
        settings.write_text(json.dumps(run_settings(task, name, url, model, folder)), encoding="utf-8")
        offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
        self._run(
            ["-m", "lm_eval", "run", "--config", str(settings)],
            log_path(folder),
            check,
            {} if task.questions is None else offline,
        )
        return name

    def _run(
        self, arguments: list[str], log: Path, check: Callable[[], None], environment: Mapping[str, str]
    ) -> None:
        # Ignore a proxy set in the environment, because the engines are on this machine. Only they are.
        local = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        with log.open("wb") as output:
            process = subprocess.Popen(
                # -I: ignore PYTHONPATH, which may have packages of the engine's environment.
                [str(self.python), "-I", *arguments],
                cwd=log.parent,
                env={**os.environ, **local, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            while process.poll() is None:
                check()
                time.sleep(_POLL_SECONDS)
        finally:
            _end(process)
        if process.returncode:
            raise HarnessError(f"lm-eval failed: {reason(log)} (log: {log})")


def find_harness(environment: Path | None = None) -> Harness:
    """Return the lm-eval that is installed in an environment.

    Args:
        environment: folder of the environment; None for ``accuracy`` in this process's environment.

    Raises:
        ConfigError: the environment has no lm-eval.
    """
    folder = environment or Path(sys.prefix, "accuracy")
    python = folder / "bin" / "python"
    task = next(folder.glob(_GSM8K_FILE), None)
    if task is None or not python.exists():
        raise ConfigError(
            f"lm-eval is not installed in {folder}; `make accuracy MODEL=path-or-id` installs it, or name "
            "an environment that has it with --lm-eval"
        )
    return Harness(python.absolute(), task.absolute())


def run_settings(task: Task, name: str, url: str, model: str, folder: Path) -> dict[str, Any]:
    """Return the settings of one run, as lm-eval reads them from a file.

    Args:
        task: questions to ask.
        name: name of lm-eval's task.
        url: base URL of an OpenAI endpoint.
        model: name of the served model.
        folder: folder for the results and for the file of the task.
    """
    return {
        "model": "local-completions",
        "model_args": {
            "model": model,
            "base_url": f"{url}/v1/completions",
            # Prompts are sent as text, so lm-eval needs neither torch nor the model's tokenizer.
            "tokenizer_backend": "none",
            "num_concurrent": task.concurrency,
            "max_gen_toks": task.answer_tokens,
            "timeout": _REQUEST_SECONDS,
        },
        "tasks": [name],
        "include_path": str(folder),
        "limit": task.limit,
        "output_path": str(folder / "results"),
        "log_samples": True,
    }


def log_path(folder: Path) -> Path:
    """Return the path of the file with lm-eval's output.

    Args:
        folder: folder of one run.
    """
    return folder / "lm-eval.log"


def reason(log: Path) -> str:
    """Return why lm-eval failed.

    Args:
        log: path of the file with lm-eval's output.
    """
    refused = _REFUSED.findall(log.read_text(encoding="utf-8", errors="replace"))
    why = f"the engine refused a question: {refused[-1]}" if refused else error_line(log)
    return (why or "it gave no reason")[:_MOST_CHARACTERS]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process if it still runs."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
