"""Run the tests that `make test` leaves out, part by part, and keep a record of what ran on which commit.

    python -m support.long.run             every part that has not run on this commit
    python -m support.long.run families-3  one part, again; several names are taken too
    python -m support.long.run --list      the names of all parts

The record is `docs/test-record.json`. `docs/test-record.md` shows it as a table.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path

from support.long.record import Counts, Machine, PartRecord, counts_of, read_record, write_record
from support.vllm_engine.runners import VARIABLE

VENV = Path(".venv")
PYTEST = (f"{VENV}/bin/python", "-m", "pytest")
SECONDS_OF_A_PART = 3600
"""Time after which a part that hangs is ended. A part takes at most ten minutes on two quiet cores."""
MATRIX = tuple(
    f"tests/engine/test_{name}.py" for name in ("families", "layouts", "tiers", "speculative", "streaming")
)
"""Test files that run every model family."""
ORACLES = ("tests/unit/planning/test_oracle.py", "tests/unit/planning/test_canonical_oracle.py")
APART = {
    "fronts": "tests/engine/test_fronts.py",
    "ray": "tests/engine/test_ray_serve.py",
    "kubernetes": "tests/unit/deploy",
    "nfs": "tests/unit/tiers/files/test_nfs.py",
}
"""Tests by what they need beside the environment: the target `.venv/.NAME` of the Makefile installs it."""
ACCURACY = "tests/engine/test_accuracy.py"
ASKED = {"smollm2": ("smollm2",), "gemma3": (), "lfm2": (), "nemotronh": (), "qwen3next": ()}
"""Models whose answers are scored, a part each, and the targets that they need beside lm-eval's."""
RELEASES = ("0.31.0", "0.33.0")
SECOND_RUNNER = tuple(
    f"tests/engine/test_{name}.py"
    for name in (
        "families", "tiers", "recovery", "streaming", "next_turn", "speculative", "speculative_tiers",
        "gpu_check",
    )
)  # fmt: skip
"""Test files, the short tests too, that also run with vLLM's second model runner, the default on GPUs."""
DEEPSEEK_V4 = tuple(f"tests/engine/test_{name}.py" for name in ("families", "tiers"))
FLEET = "tests/engine/test_fleet_hosts.py"
"""Three engines on three hosts, which start and are killed."""
TRITON = ("tests/engine/test_triton.py", "tests/engine/test_context_parallel.py")
"""Tests with Triton's attention backends for GPUs, which run on that runner."""


@dataclass(frozen=True)
class Part:
    """Tests that run in one process of pytest.

    Attributes:
        command: program and arguments.
        needs: targets of the Makefile that install what the tests need.
        environment: variables of the environment.
    """

    command: tuple[str, ...]
    needs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def _long(*arguments: str) -> tuple[str, ...]:
    apart = (*APART.values(), ACCURACY, FLEET, *TRITON)
    ignored = [f"--ignore={path}" for path in apart if path not in arguments]
    return (*PYTEST, "-m", "long", *ignored, *arguments)


def _shares(name: str, count: int, part: Part) -> dict[str, Part]:
    """Return parts with about equal shares of the tests of one."""
    return {
        f"{name}-{number}": replace(part, command=(*part.command, f"--share={number}/{count}"))
        for number in range(1, count + 1)
    }


def parts() -> dict[str, Part]:
    """Return all parts by name, in the order in which they run."""
    many = {"KVFERRY_TEST_EXAMPLES": "5"}
    on_all_cores = ("-n", "auto", "--dist=loadgroup")
    oracles = {
        f"oracle-{seed}": Part(
            (*PYTEST, *on_all_cores, "--timeout=3600", f"--hypothesis-seed={seed}", *ORACLES), (), many
        )
        for seed in range(1, 6)
    }
    properties = (*PYTEST, *on_all_cores, "--timeout=3600", "--hypothesis-seed=1", "tests/unit/planning")
    # Prompts that end at the ends of blocks suffice here; those of every length take minutes per family.
    of_second = (*PYTEST, "--timeout=1500", "-k", "not every_length and not dsv4", *SECOND_RUNNER)
    second_runner = Part(of_second, (f"{VENV}/.triton",), {VARIABLE: "2"})
    # Only the second runner runs it on a CPU.
    of_v4 = (*PYTEST, "--timeout=1500", "-k", "dsv4 and not every_length", *DEEPSEEK_V4)
    triton = replace(
        second_runner, command=_long(*TRITON), environment={VARIABLE: "2", "KVFERRY_TEST_BACKEND": "triton"}
    )
    return {
        "unit": Part(_long(*on_all_cores, "tests/unit"), (f"{VENV}/.triton",)),
        "transport": Part(_long("tests/transport")),
        "fuzz": Part(_long("tests/fuzz")),
        **_shares("families", 8, Part(_long(*MATRIX))),
        **_shares("engines", 5, Part(_long("tests/engine", *(f"--ignore={path}" for path in MATRIX)))),
        "fleet": Part(_long(FLEET)),
        **_shares("second-runner", 8, second_runner),
        **_shares("deepseek-v4", 2, replace(second_runner, command=of_v4)),
        **_shares("triton", 3, triton),
        **_shares("faults", 4, Part(_long("tests/faults"))),
        **{f"contract-{name}": Part(("make", "--silent", "contract", f"VLLM={name}")) for name in RELEASES},
        **{
            f"accuracy-{model}": Part((*PYTEST, ACCURACY, "-k", model), (f"{VENV}/.accuracy", *targets))
            for model, targets in ASKED.items()
        },
        **{name: Part((*PYTEST, path), (f"{VENV}/.{name}",)) for name, path in APART.items()},
        **oracles,
        "properties": Part((*properties, *(f"--ignore={path}" for path in ORACLES)), (), many),
    }


def run_part(part: Part) -> tuple[Counts, int]:
    """Run a part. Return its results and the seconds that it took; a failure says why it has no results."""
    for target in part.needs:
        if subprocess.run(["make", "--silent", target], check=False).returncode:
            return Counts(0, 0, (f"make {target} failed",)), 0
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        options = f"{os.environ.get('PYTEST_ADDOPTS', '')} --junitxml={report}"
        environment = {**os.environ, **part.environment, "PYTEST_ADDOPTS": options.strip()}
        began = time.monotonic()
        try:
            done = subprocess.run(part.command, env=environment, check=False, timeout=SECONDS_OF_A_PART)
        except subprocess.TimeoutExpired:
            return Counts(0, 0, (f"did not end within {SECONDS_OF_A_PART} s",)), SECONDS_OF_A_PART
        seconds = round(time.monotonic() - began)
        if not report.exists():
            return Counts(0, 0, ("pytest did not run to its end",)), seconds
        counts = counts_of(report.read_text())
        if done.returncode and not counts.failures:
            counts = replace(counts, failures=(f"stopped with exit code {done.returncode} before its end",))
        return counts, seconds


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()


def commit() -> str:
    """Return the commit of the working tree, with ``+`` if tracked files differ from it.

    The record itself does not count.
    """
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs/test-record.*")
    return _git("rev-parse", "HEAD") + "+" * bool(changed)


def is_unchanged_since(tested: str) -> bool:
    """Return whether the working tree is that of a tested commit, the record aside."""
    if tested.endswith("+"):
        return False
    command = ["git", "diff", "--quiet", tested, "--", ".", ":!docs/test-record.*"]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


def main(names: list[str]) -> int:
    """Run parts and write the record after each; 1 if a test failed, 2 for a name that no part has."""
    known = parts()
    if names == ["--list"]:
        print("\n".join(known))
        return 0
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, 1) or ["unit"]
            print(
                f"test-all: no part is called {name!r}; did you mean {near[0]}? --list has all",
                file=sys.stderr,
            )
            return 2
    failed = False
    for name in names or known:
        record, tested = read_record(), commit()
        if not names and name in record and is_unchanged_since(record[name].commit):
            continue
        print(f"test-all: {name}", flush=True)
        counts, seconds = run_part(known[name])
        record[name] = PartRecord(
            commit=tested,
            date=f"{datetime.now(UTC):%Y-%m-%d}",
            machine=Machine.this(),
            seconds=seconds,
            passed=counts.passed,
            failed=len(counts.failures),
            skipped=counts.skipped,
            failures=counts.failures,
        )
        write_record({one: record[one] for one in known if one in record})
        failed = failed or bool(counts.failures)
    return int(failed)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("test-all: stopped; the parts that ended are in the record, and the next call goes on")
