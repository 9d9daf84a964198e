"""The check of a GPU with vLLM itself runs on a CPU: a pair of kvferry's and one of NixlConnector's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.vllm_engine import runners
from support.vllm_engine.plugins import with_plugins

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(580)]

ROOT = Path(__file__).parents[2]


def checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, Any]]:
    """Exit code and result of the check, with this test's model runner."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PYTHONPATH", with_plugins(folder, runners)["PYTHONPATH"])
    environment = {**os.environ, **runners.environment()}
    options = ["--device", "cpu", "--parts", "pair", "--json"]
    command = [sys.executable, "-m", "benchmarks", "gpu_check", *options]
    done = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    (found,) = json.loads(done.stdout)["checks"]
    return done.returncode, found


def test_a_pair_of_engines_is_compared_with_one_engine_and_timed_beside_nixlconnector(
    running: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.close()
    code, found = checked(tmp_path, monkeypatch)
    assert (code, found["state"]) == (0, "passed"), found["says"]
    assert found["says"].endswith(f"(model runner V{runners.RUNNER}).")
    right, distinct, ours, theirs, ratio = found["figures"]
    assert int(right["value"].split()[0]) >= 12
    assert int(distinct["value"].split()[0]) >= 12
    assert all(float(figure["value"].split()[0]) > 0 for figure in (ours, theirs, ratio))
