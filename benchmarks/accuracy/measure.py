"""Evaluate a prefill/decode pair, then a single engine, and compare."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.accuracy.comparison import Comparison, check_same_questions
from benchmarks.accuracy.evaluation import Evaluation, read_evaluation
from benchmarks.accuracy.harness import Harness, Task, log_path
from benchmarks.accuracy.moved import check_moved, read_moved
from benchmarks.accuracy.systems import System, alone, running, spoiled
from kvferry.serving.engine import EngineSpec
from kvferry.serving.log_tail import last_line
from kvferry.serving.signals import StopSignals


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What both evaluations share.

    Attributes:
        harness: lm-eval.
        task: questions.
        folder: folder for logs and lm-eval's results.
        console: console for progress.
        signals: handler of stop signals.
        startup_timeout_seconds: longest time from the start of an engine until it is ready, in seconds.
    """

    harness: Harness
    task: Task
    folder: Path
    console: Console
    signals: StopSignals
    startup_timeout_seconds: float

    def compare(self, specs: Sequence[EngineSpec], *, spoil: bool, least_same: float) -> Comparison:
        """Evaluate a prefill/decode pair, then an engine like the decode engine but without a connector.

        Args:
            specs: specifications of the prefill engine and the decode engine.
            spoil: True to zero what the decode engine has read (negative control).
            least_same: share of answers that must have the same text, 0 to 1.

        Raises:
            ConfigError: the questions cannot be downloaded, or vLLM refused an argument.
            LaunchError: an engine did not start, or ended.
            HarnessError: lm-eval failed.
            NothingMoved: too little KV was moved to compare anything.
            StopRequested: a signal was received.
        """
        prefill, decode = specs
        if self.task.questions is None:
            # Before the engines: they may take minutes to start.
            with self.console.status("downloading GSM8K ..."):
                self.harness.check_dataset(self.folder / "download.log", self.signals.check)

        with self._running("pair", [prefill, spoiled(decode) if spoil else decode]) as system:
            pair = self._evaluate("pair", system)
            moved = read_moved(system.engine_url, len(pair.answers))
        check_moved(moved, len(pair.answers))
        with self._running("single", [alone(decode)]) as system:
            single = self._evaluate("single", system)
        check_same_questions(pair, single)
        return Comparison(
            model=decode.model,
            questions="GSM8K" if self.task.questions is None else self.task.questions.name,
            pair=pair,
            single=single,
            moved=moved,
            spoiled=spoil,
            least_same=least_same,
        )

    def _running(self, name: str, specs: Sequence[EngineSpec]) -> AbstractContextManager[System]:
        return running(specs, self.folder / name, self.console, self.signals, self.startup_timeout_seconds)

    def _evaluate(self, name: str, system: System) -> Evaluation:
        """Let lm-eval ask a system, and read the results.

        Args:
            name: name of the folder for the results.
            system: running system.
        """
        folder = self.folder / name
        shutil.rmtree(folder / "results", ignore_errors=True)  # an earlier run's, with --log-dir
        with self.console.status("") as status:

            def check() -> None:
                system.check()
                status.update(f"{name}: {last_line(log_path(folder))}")

            task = self.harness.evaluate(self.task, system.url, system.model, folder, check)
        self.console.print(f"{name}: all questions are answered", highlight=False)
        return read_evaluation(folder / "results", task)
