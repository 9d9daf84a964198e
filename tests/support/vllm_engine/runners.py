"""vLLM's model runner that engines of tests have: the first, or the second, which is the default on GPUs.

The second one needs Triton. On a CPU its kernels run by Triton's interpreter.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

RUNNER = os.environ.get("KVFERRY_TEST_RUNNER", "1")
"""Number of the runner: the same tests run with both."""
_SUPPORT = Path(__file__).parents[1]
_TRITON = Path(sys.prefix) / "triton"


def environment() -> dict[str, str]:
    """Environment variables of engines with this runner."""
    if RUNNER == "1":
        return {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    path = [str(_SUPPORT / "triton_cpu"), str(_TRITON), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(path),
    }


def declare() -> None:
    """In an engine's process: sample by PyTorch, because Triton's interpreter does not run that kernel."""
    if RUNNER != "1":
        from vllm.v1.sample.ops import topk_topp_sampler

        topk_topp_sampler.HAS_TRITON = False


def check(engine: Any) -> None:
    """Assert that an engine has this runner."""
    assert engine.llm_engine.vllm_config.use_v2_model_runner == (RUNNER == "2")
