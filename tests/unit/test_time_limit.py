"""The limit of `make test-engines MINUTES=`: where tests begin, and which are skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.time_limit import MINUTES, START

CONFTEST = """
from support.time_limit import TimeLimit

def pytest_configure(config):
    config.pluginmanager.register(TimeLimit.from_environment())
"""
TESTS = """
import time

import pytest

@pytest.mark.parametrize("setup", "ab")
@pytest.mark.parametrize("number", [1])
def test_pair(setup, number):
    time.sleep(0.3)

def test_alone():
    time.sleep(0.3)
"""


@pytest.mark.parametrize(
    ("minutes", "start", "said"),
    [
        ("1", "0", ["test_pair[1-a] PASSED", "test_pair[1-b] PASSED", "test_alone PASSED"]),
        ("1", "1", ["test_pair[1-b] PASSED", "test_alone PASSED", "test_pair[1-a] PASSED"]),
        ("0.002", "5", ["test_alone PASSED", "test_pair[1-a] SKIPPED", "test_pair[1-b] SKIPPED"]),
    ],
)
def test_it_begins_with_another_engine_and_skips_what_comes_too_late(
    minutes: str, start: str, said: list[str], tmp_path: Path
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-c", os.devnull, "."],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, MINUTES: minutes, START: start, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    lines = [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line and "%]" in line]
    assert [" ".join(line.split()[:2]) for line in lines] == said, done.stdout
