"""Every run has the same tests with the same examples."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORMAT, PLANNING = "tests/unit/tiers/format/test_format.py", "tests/unit/planning/test_strided_copy.py"

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("collection")]


def pytest_in_a_process(*arguments: str, hash_seed: int) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed), "KVFERRY_TEST_EXAMPLES": "0.1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def drawn(*paths: str, hash_seed: int) -> dict[str, str]:
    """Digest of the examples of each property."""
    output = pytest_in_a_process("-s", "-p", "support.drawn", *paths, hash_seed=hash_seed)
    return dict(re.findall(r"drawn (\S+) (\w+)", output))


def test_collecting_twice_gives_the_same_list() -> None:
    lists = [pytest_in_a_process("--collect-only", "tests", hash_seed=seed).splitlines() for seed in (1, 2)]
    one, two = (hashlib.blake2b("\n".join(names[:-1]).encode()).hexdigest() for names in lists)
    assert one == two, sorted({*lists[0]} ^ {*lists[1]})[:20]


def test_examples_do_not_depend_on_the_modules_that_are_loaded() -> None:
    alone = drawn(FORMAT, hash_seed=1)
    beside = drawn(PLANNING, FORMAT, hash_seed=2)
    assert len(alone) >= 3
    assert alone == {name: digest for name, digest in beside.items() if name in alone}
