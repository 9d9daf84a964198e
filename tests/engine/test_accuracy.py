"""`python -m benchmarks accuracy` with lm-eval, real engines and real weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.serving.smollm2 import missing_smollm2, smollm2_checkpoint
from support.apart import apart, needs

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.timeout(1200),
    needs("accuracy"),
    pytest.mark.skipif(bool(missing_smollm2()), reason=str(missing_smollm2())),
]

ROOT = Path(__file__).parents[2]
ENGINE = (
    "--enforce-eager",
    "--dtype=float32",
    "--max-model-len=2048",
    "--max-num-seqs=8",
    f"--kv-cache-memory-bytes={512 << 20}",
)


def test_answers_are_right_however_kv_moved_and_wrong_if_it_is_spoiled(running, tmp_path):
    running.close()
    command = [sys.executable, "-m", "benchmarks", "accuracy", str(smollm2_checkpoint()), "--json"]
    command += ["--questions", str(ROOT / "benchmarks" / "accuracy" / "facts.jsonl")]
    command += ["--ways", "pair,blocks,tiers,spoiled", "--lm-eval", str(apart("accuracy"))]
    command += ["--log-dir", str(tmp_path), "--", *ENGINE]
    environment = {**os.environ, "TORCH_COMPILE_DISABLE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["single"]["strict-match"]["value"] >= 0.75
    *moved, spoiled = found["ways"].values()
    for way in moved:
        assert way["same"] == found["count"], way
        assert way["moved"]["served"] == found["count"]
        assert way["moved"]["read_bytes"]
    # The commonest answer is right for an eighth of the questions.
    assert spoiled["scores"]["flexible-extract"]["value"] <= 0.25
