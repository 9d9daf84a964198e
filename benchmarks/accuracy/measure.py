"""Evaluate a single engine, then each way to move KV, and compare."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.accuracy.comparison import Comparison, Results, check_same_questions
from benchmarks.accuracy.evaluation import Evaluation, read_evaluation
from benchmarks.accuracy.harness import Harness, Task, log_path
from benchmarks.accuracy.moved import check_moved, read_moved
from benchmarks.accuracy.systems import System, running
from benchmarks.accuracy.ways import MakeFleet, Way, alone
from kvferry.tools.serving.engine import EngineSpec, last_line
from kvferry.tools.serving.processes import StopSignals


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What all evaluations share.

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

    def compare(self, model: str, fleet: MakeFleet, ways: Sequence[Way], *, least_same: float) -> Results:
        """Evaluate an engine like the decode engine without a connector, then each way to move KV.

        Args:
            model: name of the model in the report.
            fleet: function that makes the specifications of the engines.
            ways: ways to move KV.
            least_same: share of answers that must have the same text, 0 to 1.

        Raises:
            ConfigError: the questions cannot be downloaded, or vLLM refused an argument.
            LaunchError: an engine did not start, or ended.
            HarnessError: lm-eval failed.
            NothingMoved: too little KV was moved to compare anything.
            StopRequested: a signal was received.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for way in ways:
            way.engines(fleet, self.folder)  # an error is raised now, not after other engines ran
        if self.task.questions is None:
            # Before the engines: they may take minutes to start.
            with self.console.status("downloading GSM8K ..."):
                self.harness.check_dataset(self.folder / "download.log", self.signals.check)

        with self._running("single", [alone(fleet()[-1])]) as system:
            single = self._evaluate("single", system)
        return Results(
            model=model,
            questions="GSM8K" if self.task.questions is None else self.task.questions.name,
            examples=self.task.examples,
            single=single,
            comparisons=tuple(self._compare(way, fleet, single, least_same) for way in ways),
        )

    def _compare(self, way: Way, fleet: MakeFleet, single: Evaluation, least_same: float) -> Comparison:
        with tempfile.TemporaryDirectory(dir=self.folder) as kept:
            engines = way.engines(fleet, Path(kept))
            for _ in range(way.starts):
                with self._running(way.name, engines) as system:
                    found = self._evaluate(way.name, system)
                    moved = read_moved(system.engine_url, way.source, len(found.answers))
        check_moved(moved, len(found.answers))
        check_same_questions(found, single)
        return Comparison(way=way, found=found, single=single, moved=moved, least_same=least_same)

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

            asked = self.harness.evaluate(self.task, system.url, system.model, folder, check)
        self.console.print(f"{name}: all questions are answered", highlight=False)
        return read_evaluation(folder / "results", asked)
