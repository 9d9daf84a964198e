"""Pages of CPU_ATTN as AMX packs them, written by vLLM's own operation, on any processor with AVX-512."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.processor import needs_avx512

ROOT = Path(__file__).parents[4]
pytestmark = [pytest.mark.slow, needs_avx512, pytest.mark.xdist_group("amx")]


@pytest.fixture(scope="module")
def amx() -> dict[str, dict[str, Any]]:
    """What `support.backends.amx` found, by KV cache dtype."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "support.backends.amx"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3", "fp8_e5m2"])
def test_pages_that_amx_packs_are_proved_by_fields_and_wrong_descriptions_are_not(amx, kv_dtype):
    found = amx[kv_dtype]
    assert found["isa"] == "amx"
    assert found["fields"] == found["split"] == ["k", "v"]
    assert found["tried"] > 10
    assert not found["believed"]


def test_a_page_of_amx_becomes_pages_of_vector_kernels_and_back(amx):
    assert amx["auto"]["moved"]
