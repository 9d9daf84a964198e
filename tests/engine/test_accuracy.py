"""`python -m benchmarks accuracy` with lm-eval, real engines, and models whose answers mean something."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvferry.tools.serving.smollm2 import missing_smollm2
from support.apart import apart, needs

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(3000), needs("accuracy")]

ROOT = Path(__file__).parents[2]
no_smollm2 = pytest.mark.skipif(bool(missing_smollm2()), reason=str(missing_smollm2()))
ALL = "pair,tp-2-1,tp-1-2,blocks,tiers"


def evaluated(model: str, ways: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks", "accuracy", model, "--json", "--ways", ways]
    command += ["--lm-eval", str(apart("accuracy")), "--log-dir", str(folder)]
    environment = {**os.environ, "TORCH_COMPILE_DISABLE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)[model]


@pytest.mark.parametrize(
    ("model", "least_right", "ways", "controls"),
    [
        pytest.param("smollm2", 0.75, "pair,blocks,tiers", {"spoiled": 0.25}, marks=no_smollm2),
        ("gemma3", 0.95, ALL, {"spoiled-full": 0.06, "spoiled-window": 0.06}),
        ("lfm2", 0.95, ALL, {"spoiled-full": 0.06, "spoiled-state": 0.06}),
        ("nemotronh", 0.95, ALL, {"spoiled-full": 0.06, "spoiled-state": 0.1}),
        ("qwen3next", 0.95, ALL, {"spoiled-full": 0.06, "spoiled-state": 0.1}),
    ],
    ids=["smollm2", "gemma3", "lfm2", "nemotronh", "qwen3next"],
)
def test_answers_are_right_however_kv_moved_and_near_chance_if_any_kind_of_it_is_spoiled(
    running, tmp_path, model, least_right, ways, controls
):
    running.close()
    found = evaluated(model, ",".join((ways, *controls)), tmp_path)
    assert found["single"]["strict-match"]["value"] >= least_right
    for name in ways.split(","):
        way = found["ways"][name]
        assert way["same"] == found["count"], way
        assert way["moved"]["served"] == found["count"]
        assert way["moved"]["read_bytes"]
    for name, most_right in controls.items():
        assert found["ways"][name]["scores"]["flexible-extract"]["value"] <= most_right, name
