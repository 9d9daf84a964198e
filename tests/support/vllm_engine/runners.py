"""vLLM's model runner that engines of tests have: the first, or the second, which is the default on GPUs.

The second one needs Triton. On a CPU its kernels run by Triton's interpreter.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from support.triton_interpreter import skip_unused_checks

VARIABLE = "KVFERRY_TEST_RUNNER"
RUNNER = os.environ.get(VARIABLE, "1")
"""Number of the runner: the same tests run with both."""
SLOWNESS = 1.0 if RUNNER == "1" else 5.0
"""How many times longer a step may take: for leases and deadlines of tests that many steps must keep."""
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


def is_asynchronous(settings: dict[str, Any]) -> bool:
    """Whether an engine with these settings schedules a step while the one before runs.

    With the second runner it does whenever vLLM can, as on a GPU: not if it drafts n-grams.
    """
    drafts = (settings.get("speculative_config") or {}).get("method")
    return drafts != "ngram" if RUNNER == "2" else settings.get("async_scheduling", False)


def declare() -> None:
    """In an engine's process: sample by PyTorch, because Triton's interpreter does not run that kernel."""
    if RUNNER != "1":
        from vllm.v1.sample.ops import topk_topp_sampler

        topk_topp_sampler.HAS_TRITON = False
        _hasten_interpreter()
        _complete_deepseek_v4()


def _complete_deepseek_v4() -> None:
    """Add what vLLM 0.32 forgets in DeepSeek V4's metadata on a CPU: plans for CUDA, which are None there."""
    from vllm.models.deepseek_v4.cpu import cpu_mla

    def plans(*_: Any) -> dict[str, None]:
        return defaultdict(lambda: None)

    cpu_mla.DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler = plans


def _hasten_interpreter() -> None:
    """Leave out half of what Triton's interpreter does, which changes no result."""
    from triton.language import core
    from triton.runtime import interpreter

    skip_unused_checks()
    patch = interpreter._patch_lang

    def patch_once(function: Any) -> Any:
        """Replace the language's functions for good. The interpreter does so for each run of a kernel."""
        seen = [one for one in function.__globals__.values() if one in (core, interpreter.tl)]
        if any(core.is_builtin(one.load) for one in seen):
            patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once
    # Arguments are in host memory already, so what a kernel wrote need not be copied back.
    interpreter.GridExecutor._restore_args_dev = lambda *_: None


def speculator_of(engine: Any) -> Any:
    """What drafts in an engine with the second runner and one rank; None in any other."""
    worker = getattr(engine.llm_engine.engine_core.engine_core.model_executor, "driver_worker", None)
    return getattr(worker and worker.model_runner, "speculator", None) if RUNNER == "2" else None


def check(engine: Any) -> None:
    """Assert that an engine has this runner."""
    assert engine.llm_engine.vllm_config.use_v2_model_runner == (RUNNER == "2")
