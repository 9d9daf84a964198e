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
KEYS = "tests/unit/keys/test_chunk.py"
FORMAT = "tests/unit/tiers/format/test_format.py::test_any_bytes_are_refused_by_the_projects_own_error"

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


# In every run pytest-xdist compares the lists of two workers, of all tests but those of engines.
@pytest.mark.long
def test_collecting_twice_gives_the_same_list() -> None:
    lists = [pytest_in_a_process("--collect-only", "tests", hash_seed=seed).splitlines() for seed in (1, 2)]
    one, two = (hashlib.blake2b("\n".join(names[:-1]).encode()).hexdigest() for names in lists)
    assert one == two, sorted({*lists[0]} ^ {*lists[1]})[:20]


def test_examples_do_not_depend_on_the_modules_that_are_loaded() -> None:
    alone = drawn(KEYS, hash_seed=1)
    beside = drawn(FORMAT, KEYS, hash_seed=2)
    assert alone
    assert alone == {name: digest for name, digest in beside.items() if name in alone}


def test_xdist_runs_a_group_in_one_worker(tmp_path) -> None:
    path = tmp_path / "test_group.py"
    path.write_text(
        "import os, pytest\n"
        "@pytest.mark.xdist_group('one')\n"
        "@pytest.mark.parametrize('number', range(4))\n"
        "def test_worker(number): print('worker', os.environ['PYTEST_XDIST_WORKER'])\n"
    )
    output = pytest_in_a_process("-n", "2", "--dist", "loadgroup", "-rP", str(path), hash_seed=1)
    assert len({*re.findall(r"worker (gw\d)", output)}) == 1, output
