"""Content adapters against pages that vLLM's compiled Triton kernel has written, if vLLM is installed."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.gpu_check.job import GpuCheckJob
from benchmarks.gpu_check.result import CheckResult, CheckState, Figure, judged

ORDERS = {"tokens before heads": (0, 2, 1, 3), "heads before tokens": (0, 1, 2, 3)}
"""Order of the axes of a page in memory: permutation that returns (blocks, heads, tokens, content)."""

_NAME = "content adapters"
_BACKEND = "TRITON_ATTN"
_BLOCKS, _HEADS, _TOKENS, _WIDTH = 4, 2, 32, 64


def check_content(job: GpuCheckJob) -> CheckResult:
    """Let vLLM's kernel write known values, and look for them where the adapter says.

    Args:
        job: device.
    """
    if not job.on_gpu:
        return CheckResult(_NAME, CheckState.NOT_RUN, "A compiled kernel needs a GPU.")
    if find_spec("vllm") is None:
        says = "vLLM, whose kernel writes, is not installed. Each engine proves its adapters when it starts."
        return CheckResult(_NAME, CheckState.NOT_RUN, says)
    figures = [proved(job.torch_device, order) for order in ORDERS]
    return judged(_NAME, f"{_BACKEND}'s compiled kernel wrote the pages.", figures)


def proved(device: str, order: str) -> Figure:
    """Return whether the adapter of pages in an order is proved, as a figure.

    Args:
        device: torch device of the pages.
        order: key of `ORDERS`.
    """
    from vllm.v1.attention.backend import AttentionType  # noqa: PLC0415 - vLLM may be missing
    from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: PLC0415
    from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode  # noqa: PLC0415

    from kvferry.engines.vllm.content import Shard, page_of_attention  # noqa: PLC0415 - imports vLLM

    backend = AttentionBackendEnum[_BACKEND].get_class()
    # Only its write is called, and its constructor wants a whole engine.
    impl: Any = object.__new__(backend.get_impl_cls())
    impl.__dict__ |= {
        "attn_type": AttentionType.DECODER,
        "kv_cache_dtype": "auto",
        "head_size": _WIDTH,
        "_kv_quant_mode": get_kv_quant_mode("auto"),
        "_is_per_token_head_quant": False,
    }
    one = torch.ones((), device=device)
    layer = SimpleNamespace(
        get_attn_backend=lambda: backend, impl=impl, kv_cache_dtype="auto", dtype=torch.bfloat16,
        _k_scale=one, _v_scale=one,
    )  # fmt: skip
    spec = FullAttentionSpec(
        block_size=_TOKENS, num_kv_heads=_HEADS, head_size=_WIDTH, head_size_v=_WIDTH, dtype=torch.bfloat16,
        kv_quant_mode=get_kv_quant_mode("auto"),
    )  # fmt: skip
    axes, shape = ORDERS[order], (_BLOCKS, _HEADS, _TOKENS, 2 * _WIDTH)
    memory = torch.zeros([shape[axis] for axis in axes], dtype=torch.bfloat16, device=device)
    page = page_of_attention(layer, "checked", spec, memory.permute(axes), _BLOCKS, Shard(0, 1, 0, _HEADS))
    names = [field.name for field in page.fields]
    found = "whole pages" if page.opaque else " ".join(names)
    return Figure(f"{_BACKEND}, bfloat16, {order}", found, "k v", names == ["k", "v"])
