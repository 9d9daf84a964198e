"""`benchmarks offload` starts a real engine, measures it, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.long]

ROOT = Path(__file__).parents[2]
SMALL = ("--parts", "hooks,ttft", "--prompt", "1024", "--rounds", "1", "--json")


def test_hooks_and_first_tokens_are_measured_once_through(tmp_path: Path) -> None:
    said = subprocess.run(
        [sys.executable, "-m", "benchmarks", "offload", *SMALL, "--path", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    loaded = json.loads(said.stdout)
    hooks, first = loaded["hooks"], loaded["first_token"]
    assert len(hooks["decoding"]["hooks"]) > 50
    assert all(0 < h < s for h, s in zip(hooks["decoding"]["hooks"], hooks["decoding"]["steps"], strict=True))
    assert hooks["storing"]["hooks"]
    assert "build_connector_meta" in hooks["by_hook"]
    assert first["as_fast"]["host"]["median"] > 1
    assert set(first["warm"]) == {"host", "file", "prefetched"}
    assert list(tmp_path.iterdir()) == []
