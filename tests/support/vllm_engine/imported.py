"""A process that has imported what engines import, and that engines' processes are copies of.

To import is most of the work of a start. That process starts nothing else: it has one thread, and what an
engine reads from its environment is read in the copy. NIXL is not among it: UCX looks at the environment
when it is loaded.
"""

from __future__ import annotations

import multiprocessing as mp
import os
from multiprocessing import forkserver
from typing import Any
from unittest import mock

_MODELS = (
    "deepseek_v2", "falcon_h1", "gemma3", "gemma4", "gpt_oss", "granitemoehybrid", "lfm2", "llama", "mamba2",
    "nemotron_h", "qwen3", "qwen3_5", "qwen3_next", "zamba2",
)  # fmt: skip
MODULES = (
    "pytest",
    "support.vllm_engine.no_amx",
    "support.vllm_engine.no_torchvision",
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.model_executor.model_loader",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "kvferry.engines.vllm.connector",
    "kvferry.engines.vllm.worker",
    "kvferry.engines.vllm.scheduler",
    *(f"vllm.model_executor.models.{name}" for name in _MODELS),
)


def context(environment: dict[str, str]) -> Any:
    """What makes such copies; the first call starts the process, with this on top of what is around it."""
    copies = mp.get_context("forkserver")
    copies.set_forkserver_preload(list(MODULES))
    with mock.patch.dict(os.environ, environment):
        forkserver.ensure_running()
    return copies
