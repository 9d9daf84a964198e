"""The table of docs/backends.md says how the probe finds pages of vLLM's attention backends to move."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from support.apart import apart, needs
from support.backends.table import LAYOUTS, NOT_RUN
from support.processor import needs_avx512, needs_avx512_bf16

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


ADD = (
    "add a row to the table of docs/backends.md, and an entry of NOT_RUN or an adapter (see CONTRIBUTING.md)"
)


def test_every_backend_of_vllm_is_in_the_table():
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    installed, rows = {member.name for member in AttentionBackendEnum}, {row[0] for row in documented()}
    assert installed - rows <= SINCE_0_33, ADD
    assert rows - installed <= SINCE_0_32, "take backends that vLLM has no more out of docs/backends.md"
    assert set(NOT_RUN) <= rows


def test_every_kv_cache_dtype_of_vllm_is_in_the_table():
    from vllm.config.cache import CacheDType

    # Gaudi's plugin has backends of its own; dtypes of backends that are not run are named with them.
    elsewhere = {"fp8_inc"}
    named = {dtype for row in documented() for dtype in row[1].split()}
    installed = set(get_args(CacheDType))
    assert installed - named - elsewhere <= DTYPES_SINCE_0_33, ADD
    assert named - installed <= DTYPES_SINCE_0_32, "take dtypes that vLLM has no more out of docs/backends.md"


def test_every_layout_of_vllm_is_probed():
    from vllm.v1.kv_cache_layout import KVCacheLayout

    assert set(LAYOUTS) == {layout.name for layout in KVCacheLayout}, (
        "change LAYOUTS of support.backends.table"
    )


def probed(*arguments: str) -> str:
    """Run the probe in a process of its own, with vLLM's Triton kernels interpreted."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "support.backends.table", *arguments],
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
    return found.stdout


@pytest.fixture(scope="module")
def sample() -> list[list[str]]:
    """(backend, dtype, layout, how pages move, how that was shown) of a sample of all cases."""
    output = probed("--sample")
    return json.loads(output[output.index("[[") :])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.xdist_group("attention backends")
@needs_avx512
@needs("triton")
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(name, marks=needs_avx512_bf16 if name == "AMX_MLA" else ())
        for name in dict.fromkeys(row[0] for row in documented())
        if name not in NOT_RUN
    ],
)
def test_a_sample_of_a_backends_pages_moves_as_the_table_says(backend, sample):
    rows = [row[1:] for row in documented() if row[0] == backend]
    found = [case[1:] for case in sample if case[0] == backend]
    assert found
    for kv_dtype, layout, *moves in found:
        (expected,) = (
            said
            for dtypes, layouts, *said in rows
            if kv_dtype in dtypes.split() and layout in (LAYOUTS if layouts == "any" else layouts.split())
        )
        assert moves == expected, (kv_dtype, layout)


@pytest.mark.long
@pytest.mark.timeout(900)
@needs_avx512_bf16
@needs("triton")
def test_the_probe_finds_what_the_table_says():
    output = probed()
    table = output[output.index("| Backend |") :]
    assert table in PAGE.read_text(), f"docs/backends.md should have this table:\n{table}"
