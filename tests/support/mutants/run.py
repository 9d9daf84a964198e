"""Measure how many mutants the tests kill: `make mutants SEED=1 MUTANTS=80`.

All mutants are planted in a copy of the tree. One run of the tests without any of them on notes which tests
reach which mutant, and which tests fail in the copy anyway. Then each mutant is switched on, and the tests
that reach it run until one fails. A mutant that no test fails on survives.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from support.mutants.draw import SWITCH, Mutant, draw
from support.vllm_engine.runners import VARIABLE

ROOT = Path(__file__).parents[3]
FOLDERS = ("planning", "connector", "tiers", "transport", "engines", "serving")
SECONDS_OF_A_MUTANT = 1200
"""A mutant whose tests take longer than this makes something hang, which a test would report."""


@dataclass(frozen=True)
class Stage:
    """Tests that run together: those of `make test` without engines, with them, or with vLLM's second runner.

    Attributes:
        name: name of the stage.
        paths: folders of the tests.
        options: further arguments of pytest.
        environment: variables of the environment.
    """

    name: str
    paths: tuple[str, ...]
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def arguments(self) -> tuple[str, ...]:
        return ("-m", "not long", *self.options, *self.paths)


STAGES = (
    Stage(
        "unit",
        ("tests/unit", "tests/fuzz", "tests/transport", "src/kvferry"),
        ("-n", "2", "--dist=loadgroup"),
    ),
    Stage("engine", ("tests/engine", "tests/faults")),
    Stage(
        "second runner",
        ("tests/engine/test_next_turn.py", "tests/engine/test_streaming.py"),
        environment={VARIABLE: "2"},
    ),
)


@dataclass(frozen=True)
class Verdict:
    """Result of a mutant: the test that failed on it, or how many passed."""

    mutant: Mutant
    killed_by: str
    passed: int


class Copy:
    """A copy of the tree with mutants."""

    def __init__(self, folder: Path, seed: int, count: int) -> None:
        self.folder = folder
        self.mutants, texts = draw(ROOT / "src" / "kvferry", FOLDERS, seed, count)
        self.logs = folder / "reached"
        self.failing: set[str] = set()
        if not (folder / "src").exists():
            archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True)
            subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
            package = folder / "src" / "kvferry"
            for file, text in texts.items():
                (package / file).write_text(text)
            (package / "mutant_switch.py").write_text(SWITCH)
            for library in (ROOT / "src" / "kvferry" / "memory").glob("*.so"):
                (package / "memory" / library.name).write_bytes(library.read_bytes())

    def pytest(self, *arguments: str, seconds: float | None = None, **variables: str) -> tuple[int, str]:
        """Run pytest in the copy. Return its exit code and output."""
        path = os.pathsep.join(str(self.folder / part) for part in ("src", "tests", ""))
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfE", *arguments],
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": path, **variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return 1, "FAILED (did not end)"
        return done.returncode, done.stdout

    def reach(self, stage: Stage) -> None:
        """Run the tests of a stage without a mutant, and note what each reaches and which fail."""
        noted = self.folder / f"failing-{stage.name}.json"
        if not noted.exists():
            self.logs.mkdir(exist_ok=True)
            _, output = self.pytest(*stage.arguments, KVFERRY_MUTANT_LOG=str(self.logs), **stage.environment)
            noted.write_text(json.dumps(_failed(output)))
        self.failing |= {*json.loads(noted.read_text())}

    def tests_of(self, mutant: Mutant, stage: Stage) -> list[str]:
        """Return the tests of a stage that reach a mutant, those of its own folder first."""
        path = self.logs / str(mutant.number)
        found = {_without_group(test) for test in path.read_text().splitlines()} if path.exists() else set()
        folder = mutant.file.partition("/")[0]
        if "at import" in found:
            found.add(f"tests/unit/{folder}")
        known = (test for test in found if test.startswith(stage.paths) and test not in self.failing)
        return sorted(known, key=lambda test: (not test.startswith(f"tests/unit/{folder}"), test))

    def judge(self, mutant: Mutant, stage: Stage) -> Verdict:
        """Switch a mutant on, and run the tests of a stage that reach it until one fails."""
        tests = self.tests_of(mutant, stage)
        if not tests:
            return Verdict(mutant, "", 0)
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("\n".join(tests))
            file.flush()
            rest = [f"--deselect={test}" for test in sorted(self.failing)]
            variables = {**stage.environment, "KVFERRY_MUTANT": str(mutant.number)}
            code, text = self.pytest("-x", f"@{file.name}", *rest, seconds=SECONDS_OF_A_MUTANT, **variables)
        if "ERROR: not found:" in text:
            raise RuntimeError(text[-2000:])
        if code in {0, 5}:
            return Verdict(mutant, "", len(tests))
        return Verdict(mutant, (_failed(text) or [text[-300:]])[0], 0)


def _failed(output: str) -> list[str]:
    lines = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return [_without_group(line.split(" ", 1)[1].split(" - ")[0]) for line in lines]


def _without_group(test: str) -> str:
    """Return the id of a test without the group that pytest-xdist appends."""
    name, _, group = test.rpartition("@")
    return name if name and "]" not in group and "::" not in group else test


def main(arguments: Sequence[str]) -> int:
    """Print each mutant with the test that kills it, and the survivors."""
    parser = argparse.ArgumentParser(prog="python -m support.mutants.run", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--folder", type=Path, help="for the copy; an earlier run in it goes on")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of mutants")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        copied = Copy(folder, given.seed, given.count)
        left = [one for one in copied.mutants if not given.only or one.number in given.only]
        for stage in STAGES:
            left = _survivors(copied, stage, left)
    print(f"{len(copied.mutants) - len(left)} of {len(copied.mutants)} killed")
    return 0


def _survivors(copied: Copy, stage: Stage, mutants: list[Mutant]) -> list[Mutant]:
    """Judge mutants by the tests of a stage, print each verdict, and return the mutants that survive."""
    if not mutants:
        return []
    copied.reach(stage)
    survivors: list[Mutant] = []
    workers = len(os.sched_getaffinity(0)) if stage.options else 1
    with ThreadPoolExecutor(workers) as pool, (copied.folder / "verdicts.txt").open("a") as file:
        for verdict in pool.map(lambda mutant: copied.judge(mutant, stage), mutants):
            print(line := f"{stage.name}: {_shown(verdict)}", flush=True)
            file.write(f"{line}\n")
            file.flush()
            if not verdict.killed_by:
                survivors.append(verdict.mutant)
    return survivors


def _shown(verdict: Verdict) -> str:
    one = verdict.mutant
    by = f"killed by {verdict.killed_by}" if verdict.killed_by else f"SURVIVES {verdict.passed} tests"
    return f"{one.number} {one.file}:{one.line} {one.text}: {by}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
