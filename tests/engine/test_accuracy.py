"""`python -m benchmarks accuracy` with lm-eval and real engines, on a checkpoint with random weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.serving.tiny import tiny_checkpoint
from support.apart import apart, needs

LM_EVAL = str(apart("accuracy"))
pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.timeout(600),
    needs("accuracy"),
]

ROOT = Path(__file__).parents[2]
ENGINE = [
    "--enforce-eager",
    "--dtype=float32",
    "--max-model-len=2048",
    "--max-num-seqs=8",
    f"--kv-cache-memory-bytes={64 << 20}",
]


def compared(model: Path, folder: Path, *options: str) -> dict:
    command = [sys.executable, "-m", "benchmarks", "accuracy", str(model), "--json", *options]
    command += ["--lm-eval", LM_EVAL, "--log-dir", str(folder)]
    command += ["--questions", str(ROOT / "benchmarks" / "accuracy" / "examples.jsonl"), "--", *ENGINE]
    environment = {**os.environ, "TORCH_COMPILE_DISABLE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def model(running, checkpoints) -> Path:
    running.close()
    return tiny_checkpoint("qwen3", checkpoints)


def test_a_pair_answers_questions_of_lm_eval_as_one_engine_does(model, tmp_path):
    found = compared(model, tmp_path, "--min-same", "1")
    assert (found["count"], found["same"], found["passed"]) == (8, 8, True)
    assert found["moved"]["served"] == 8
    assert found["moved"]["tokens"] > 8 * 500
    assert found["moved"]["read_bytes"] > 0


def test_the_answers_differ_if_the_kv_that_moved_is_spoiled(model, tmp_path):
    found = compared(model, tmp_path, "--spoil")
    assert (found["count"], found["same"], found["passed"]) == (8, 0, True)
    assert found["moved"]["served"] == 8
