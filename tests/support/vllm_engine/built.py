"""What vLLM keeps per layer: its own model classes, built without weights, asked for their cache specs.

A process of its own, since it replaces what vLLM cannot do on this machine: it reads one JSON object per
line, ``{"config": ..., "tp": ...}``, and answers each with a line: ``{"layers": [...], "groups": {...}}`` or
``{"error": ...}``. Groups, with the tokens of their blocks, are those that vLLM forms of these specs, by
`SETUPS`.
Parameters are on PyTorch's meta device, which has shapes and no memory, so models are built in full size.

Replaced, none of it decides what a layer keeps: tensor-parallel groups (only their sizes are asked for),
events of CUDA, the kernel of experts, torchvision, and the refusal to select a sparse
attention backend on a CPU.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from support.vllm_engine import no_torchvision

MAX_MODEL_LEN = 1024
SETUPS = {"cuda L": ("cuda", "LBNHC"), "cuda B": ("cuda", "BLHNC"), "cpu": ("cpu", "LBHNC")}
"""Whose rules for block sizes, and which layout. CUDA's attention kernels take multiples of 16 tokens, but
those of sparse attention, which say themselves what they take."""
_GROUPS = ("_TP", "_PP", "_DP", "_EP", "_EPLB", "_DCP", "_PCP", "_WORLD")
_OVER_ALL = ("_TP", "_EP", "_WORLD")
_SMALL = 512
"""Hidden size up to which a model has memory: some look at what they make."""


def ask(questions: Iterable[tuple[dict[str, Any], int]]) -> Iterator[dict[str, Any]]:
    """The answers to (config, tensor-parallel ranks), from a process of its own."""
    lines = "".join(json.dumps({"config": config, "tp": tp}) + "\n" for config, tp in questions)
    environment = {
        **os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_USE_V2_MODEL_RUNNER": "0", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", __name__], input=lines, capture_output=True, text=True, env=environment,
        cwd=Path(__file__).parents[2], check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return map(json.loads, done.stdout.splitlines())


def _main() -> None:
    with redirect_stdout(sys.stderr):
        replace_parts()
        answers = [_answer(json.loads(line)) for line in sys.stdin]
    for answer in answers:
        sys.stdout.write(json.dumps(answer) + "\n")


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    try:
        engine = built_engine(question["config"], question["tp"])
        return {"layers": list(_layers(engine)), "groups": _groups(engine)}
    except Exception as error:  # noqa: BLE001 - whatever vLLM says of this configuration is the answer
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return {"error": f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"}


def replace_parts() -> None:
    """Take out of vLLM's way what this machine lacks, or has and other machines lack."""
    import torch
    from transformers import AutoConfig

    torch.cpu._is_amx_tile_supported = lambda: False  # as `no_amx`
    import torch._dynamo

    with suppress(ImportError):
        import tvm_ffi  # noqa: F401  # asks for CUDA's bindings once, when imported
    sys.meta_path.append(no_torchvision.Missing("cutlass", "cuda"))
    torch.Event = torch.cuda.Event = type("Event", (), {"__init__": lambda *_, **__: None})

    from vllm.model_executor.layers.fused_moe import (
        config as experts,
        unquantized_fused_moe_method as unquantized,
    )
    from vllm.model_executor.models import registry
    from vllm.platforms.cpu import CpuPlatform
    from vllm.transformers_utils.configs.minimax_m3 import MiniMaxM3TextConfig

    logging.disable(logging.CRITICAL)
    AutoConfig.register("minimax_m3_text", MiniMaxM3TextConfig, exist_ok=True)
    registry._run_in_subprocess = lambda inspect: inspect()
    check, select = experts.FusedMoEConfig.__post_init__, unquantized.select_unquantized_moe_backend

    def checked(self: Any) -> None:
        with suppress(NotImplementedError):
            check(self)

    def selected(**asked: Any) -> Any:
        try:
            return select(**asked)
        except NotImplementedError:
            return unquantized.UnquantizedMoeBackend.TRITON, mock.MagicMock()

    experts.FusedMoEConfig.__post_init__ = checked
    unquantized.select_unquantized_moe_backend = selected
    of_cpu = CpuPlatform.get_attn_backend_cls.__func__

    def backend(cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: Any = None) -> str:
        return of_cpu(cls, selected_backend, attn_selector_config._replace(use_sparse=False), num_heads)

    CpuPlatform.get_attn_backend_cls = classmethod(backend)
    update = CpuPlatform.check_and_update_config.__func__

    def updated(cls: Any, engine: Any) -> None:
        cache = engine.cache_config
        state_dtype = cache.mamba_ssm_cache_dtype
        update(cls, engine)
        # Only on a CPU must recurrent state be float32.
        cache.mamba_ssm_cache_dtype = state_dtype

    CpuPlatform.check_and_update_config = classmethod(updated)
    torch.cuda.Stream = torch.Event


def built_engine(config: dict[str, Any], tp: int) -> Any:
    """vLLM's configuration, with the layers of the model that was built by it."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        engine = EngineArgs(
            model=folder, skip_tokenizer_init=True, enforce_eager=True, max_model_len=MAX_MODEL_LEN,
            load_format="dummy", enable_prefix_caching=False,
        ).create_engine_config()  # fmt: skip
    engine.parallel_config.tensor_parallel_size = tp
    engine.model_config.verify_with_parallel_config(engine.parallel_config)
    for name in _GROUPS:
        setattr(parallel_state, name, _group(tp if name in _OVER_ALL else 1))
    small = engine.model_config.hf_text_config.hidden_size <= _SMALL
    device, dtype = torch.device("cpu" if small else "meta"), engine.model_config.dtype
    with set_current_vllm_config(engine), device, set_default_torch_dtype(dtype):
        initialize_model(engine)
    return engine


def _group(size: int) -> Any:
    """A group of so many ranks that can be asked for its size and for nothing else."""
    handle = SimpleNamespace(size=lambda: size, rank=lambda: 0)
    return SimpleNamespace(
        world_size=size, rank_in_group=0, rank=0, local_rank=0, ranks=list(range(size)), first_rank=0,
        last_rank=size - 1, is_first_rank=True, is_last_rank=True, device_group=handle, cpu_group=handle,
        device_communicator=None, unique_name="sizes only",
    )  # fmt: skip


def _layers(engine: Any) -> Iterator[dict[str, Any]]:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    with set_current_vllm_config(engine):
        for name, layer in engine.compilation_config.static_forward_context.items():
            if isinstance(layer, AttentionLayerBase):
                yield {"name": name, "layer": int(re.search(r"\.(\d+)\.", name)[1]), **_kept(layer, engine)}


def _kept(layer: Any, engine: Any) -> dict[str, Any]:
    """What one layer keeps on rank 0."""
    if shared := getattr(layer, "kv_sharing_target_layer_name", None):
        return {"shares": shared}
    spec = layer.get_kv_cache_spec(engine)
    if spec is None:
        return {"spec": None}
    found = {"spec": type(spec).__name__, "block_tokens": spec.block_size}
    if hasattr(spec, "shapes"):
        return {**found, "bytes": spec.real_page_size_bytes}
    spans = (getattr(spec, key, None) for key in ("sliding_window", "attention_chunk_size", "rswa_window"))
    return {
        **found,
        "reach": next((each for each in spans if each), 0),
        "heads": spec.num_heads,
        "bytes": spec.num_heads * spec.state_content_size_bytes,
        "state_tokens": int(spec.tokens_per_state),
    }


def _groups(engine: Any) -> dict[str, Any]:
    """By name in `SETUPS`, the groups: of each, [spec, tokens of a block, layers] for what its layers keep.

    Where vLLM refuses a set-up, its words.
    """
    found: dict[str, Any] = {}
    for name, (platform, layout) in SETUPS.items():
        try:
            with formed_groups(engine, platform, layout) as groups:
                found[name] = [_alike(group) for group in groups]
        except (NotImplementedError, ValueError) as refusal:
            found[name] = str(refusal)
    return found


@contextmanager
def formed_groups(engine: Any, platform: str, layout: str) -> Iterator[list[Any]]:
    """The groups that vLLM forms on a platform, while the engine's configuration is of that set-up."""
    from vllm.config import set_current_vllm_config
    from vllm.platforms.cpu import CpuPlatform
    from vllm.platforms.interface import Platform
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

    own = copy(engine.cache_config.__dict__)
    with ExitStack() as replaced:
        replaced.callback(engine.cache_config.__dict__.update, own)
        engine.cache_config.kv_cache_layout = layout
        if engine.model_config.is_hybrid:
            engine.cache_config.mamba_cache_mode = "align"
        if platform == "cuda":
            for backend in (CPUAttentionBackend, CPUMLABackend):
                taken = {
                    "get_supported_kernel_block_sizes": staticmethod(
                        lambda kv_cache_spec=None: [MultipleOf(16)]
                    ),
                    "supports_block_size": classmethod(lambda _, n: n is None or n % 16 == 0),
                }
                for method, instead in taken.items():
                    replaced.enter_context(mock.patch.object(backend, method, instead))
        (CpuPlatform if platform == "cpu" else Platform).update_block_size_for_backend(engine)
        with set_current_vllm_config(engine):
            yield get_kv_cache_groups(engine, dict(_specs(engine)))


def _specs(engine: Any) -> Iterator[tuple[str, Any]]:
    """(name, spec) of every layer that keeps something of its own."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    for name, layer in engine.compilation_config.static_forward_context.items():
        if isinstance(layer, AttentionLayerBase) and not getattr(layer, "kv_sharing_target_layer_name", None):
            spec = layer.get_kv_cache_spec(engine)
            if spec is not None:
                yield name, spec


def _alike(group: Any) -> list[tuple[str, int, int]]:
    each = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    counted = Counter(
        (type(spec).__name__, spec.block_size, spec.page_size_bytes)
        for spec in each.values() or [group.kv_cache_spec] * len(group.layer_names)
    )
    return [(name, tokens, layers) for (name, tokens, _), layers in counted.items()]


if __name__ == "__main__":
    _main()
