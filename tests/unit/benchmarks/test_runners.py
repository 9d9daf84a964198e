"""The choice of vLLM's model runner for engines of benchmarks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import runners
from benchmarks.handover.command import handover
from kvferry.common.errors import ConfigError

ROOT = Path(__file__).parents[3]
SHOW = """
import os
from benchmarks.runners import has_second_runner, use_runner
use_runner({number})
print(os.environ["VLLM_USE_V2_MODEL_RUNNER"], has_second_runner(), os.environ.get("TRITON_INTERPRET"))
"""


@pytest.mark.parametrize(("number", "shown"), [(1, "0 False None"), (2, "1 True 1")])
def test_engines_get_the_runner_that_was_chosen(number: int, shown: str, tmp_path: Path) -> None:
    triton = (
        f"from benchmarks import runners; runners._TRITON = __import__('pathlib').Path({str(tmp_path)!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", triton + SHOW.format(number=number)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "KVFERRY_TEST_RUNNER": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == shown


def test_second_runner_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runners, "_TRITON", tmp_path / "none")
    with pytest.raises(ConfigError, match=r"needs Triton in .*; run `make \.venv/\.triton`"):
        handover(runner=2)
