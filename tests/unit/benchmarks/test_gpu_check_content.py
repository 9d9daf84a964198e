"""The check of content adapters on a GPU finds K and V in the pages that vLLM's Triton kernel writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.apart import apart, needs

ROOT = Path(__file__).parents[3]
WHERE = str(apart("triton"))

CHECK = """
from support.backends.pretend import pretend
pretend(triton=True)
from benchmarks.gpu_check import content
from benchmarks.gpu_check.content import ORDERS, proved
from kvferry.engines.vllm.content import adapters
content._TOKENS = 8  # the interpreter takes its time for every token
print([proved("cpu", order).met for order in ORDERS])
adapters.ADAPTERS["TRITON_ATTN"] = ()
print([proved("cpu", order).met for order in ORDERS])
"""


@pytest.mark.slow
@needs("triton")
def test_the_adapter_is_proved_for_both_orders_and_none_without_an_adapter():
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHECK],
        env=os.environ
        | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), str(ROOT), WHERE]),
            "TRITON_INTERPRET": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        },
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-4000:]
    assert found.stdout.splitlines()[-2:] == ["[True, True]", "[False, False]"]
