"""The table of docs/backends.md is what the probe finds over vLLM's attention backends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from support.apart import apart, needs
from support.backends.table import NOT_RUN
from support.processor import needs_avx512

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs" / "backends.md"
# The page's table is of the pinned release. Other supported releases differ from it by these.
SINCE_0_32, DTYPES_SINCE_0_32 = {"ROCM_SEGMENTED_ATTN", "ULTRAQUANT"}, {"ultraquant_4bit"}
SINCE_0_33 = {"FLASH_ATTN_MLA_SPARSE_FA4", "ROCM_FLASHMLA_SPARSE_DSV41", "ROCM_OCTAVE", "STEP5_DSA"}
DTYPES_SINCE_0_33 = {"octave_k3v3", "octave_k3v3_compact", "octave_k3v4"}
WHERE = str(apart("triton"))


def documented() -> list[list[str]]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_backend_of_vllm_is_in_the_table():
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    installed, rows = {member.name for member in AttentionBackendEnum}, {row[0] for row in documented()}
    assert installed - rows <= SINCE_0_33
    assert rows - installed <= SINCE_0_32
    assert set(NOT_RUN) <= {row[0] for row in documented()}


def test_every_kv_cache_dtype_of_vllm_is_in_the_table():
    from vllm.config.cache import CacheDType

    # Gaudi's plugin has backends of its own; dtypes of backends that are not run are named with them.
    elsewhere = {"fp8_inc"}
    named = {dtype for row in documented() for dtype in row[1].split()}
    installed = set(get_args(CacheDType))
    assert installed - named - elsewhere <= DTYPES_SINCE_0_33
    assert named - installed <= DTYPES_SINCE_0_32


def test_every_layout_of_vllm_is_probed():
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from support.backends.table import LAYOUTS

    assert set(LAYOUTS) == {layout.name for layout in KVCacheLayout}


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_avx512
@needs("triton")
def test_the_probe_finds_what_the_table_says():
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "support.backends.table"],
        env=os.environ
        | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), WHERE]),
            "TRITON_INTERPRET": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        },
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-4000:]
    table = found.stdout[found.stdout.index("| Backend |") :]
    assert table in PAGE.read_text(), f"docs/backends.md should have this table:\n{table}"
