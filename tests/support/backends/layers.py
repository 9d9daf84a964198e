"""A layer of one backend and its cache, as vLLM makes them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

BLOCKS = 4
LAYERS = 3


@dataclass(frozen=True)
class Case:
    """One cache.

    Attributes:
        backend: by its name in vLLM's registry.
        kv_dtype: the KV cache dtype.
        layout: of vLLM's enum.
        heads, k, v: KV heads, widths of K and V; v is 0 of a latent.
        tokens: tokens of a block.
        dtype: what the model computes in.
        scales: of K and V.
    """

    backend: str
    kv_dtype: str
    layout: str = "LBNHC"
    heads: int = 2
    k: int = 64
    v: int = 64
    tokens: int = 32
    dtype: torch.dtype = torch.bfloat16
    scales: tuple[float, float] = (1.0, 1.0)


def make(case: Case) -> tuple[Any, Any, torch.Tensor]:
    """Return (layer, spec, cache of its last layer but one)."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    backend = AttentionBackendEnum[case.backend].get_class()
    layer = _layer(case, backend)
    spec = backend.customize_spec(_spec(case))
    return layer, spec, _cache(case, spec)


def _spec(case: Case) -> Any:
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, get_kv_quant_mode

    dtype = STR_DTYPE_TO_TORCH_DTYPE.get(case.kv_dtype, case.dtype)
    common = {
        "block_size": case.tokens,
        "num_kv_heads": case.heads,
        "head_size": case.k,
        "dtype": dtype,
        "kv_quant_mode": get_kv_quant_mode(case.kv_dtype),
    }
    if case.v:
        return FullAttentionSpec(**common, head_size_v=case.v)
    content = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}.get(case.kv_dtype)
    return MLAAttentionSpec(**common, cache_dtype_str=case.kv_dtype, state_content_bytes=content)


def _cache(case: Case, spec: Any) -> torch.Tensor:
    from vllm.v1.kv_cache_interface import (
        KVCacheTensor,
        compute_layout_strides,
        create_kv_cache_views,
    )
    from vllm.v1.kv_cache_layout import KVCacheLayout

    layout = KVCacheLayout[case.layout]
    strides = compute_layout_strides(spec, BLOCKS, LAYERS, layout)
    raw = torch.zeros(BLOCKS * LAYERS * spec.page_size_bytes, dtype=torch.int8)
    tensor = KVCacheTensor(
        size=len(raw),
        layers=[f"layers.{n}" for n in range(LAYERS)],
        offset=0,
        layer_stride=strides[0],
        block_stride=strides[1],
    )
    return create_kv_cache_views(raw, spec, BLOCKS, layout, tensor)[-2]


def _layer(case: Case, backend: Any) -> Any:
    """A layer with what the write operation reads; vLLM's constructor makes its implementation if it can."""
    layer = SimpleNamespace(
        get_attn_backend=lambda: backend,
        kv_cache_dtype=case.kv_dtype,
        dtype=case.dtype,
        num_kv_heads=case.heads,
        head_size=case.k,
        qk_rope_head_dim=64 if case.k > 64 else 16,
        impl=_impl(case, backend),
    )
    for name, scale in zip("kv", case.scales, strict=True):
        setattr(layer, f"_{name}_scale", torch.tensor(scale))
        setattr(layer, f"_{name}_scale_float", scale)
    if case.backend == "CPU_ATTN":
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        layer.isa = _get_attn_isa(case.dtype, case.tokens, case.k, case.kv_dtype)
    return layer


def _impl(case: Case, backend: Any) -> Any:
    made = backend.get_impl_cls()
    if hasattr(backend, "set_head_size_v"):
        backend.set_head_size_v(case.v)
    try:
        return made(case.heads, case.k, 1.0, case.heads, None, None, case.kv_dtype)
    except Exception:  # noqa: BLE001 - constructors ask for more of a GPU than writing does
        impl = object.__new__(made)
    from vllm.platforms import current_platform
    from vllm.v1.attention.backend import AttentionType

    impl.__dict__ |= {
        "attn_type": AttentionType.DECODER,
        "kv_cache_dtype": case.kv_dtype,
        "cache_dtype": case.kv_dtype,
        "num_kv_heads": case.heads,
        "head_size": case.k,
        "fp8_dtype": current_platform.fp8_dtype(),
        "kv_sharing_target_layer_name": None,
        "is_kvcache_nvfp4": case.kv_dtype.startswith("nvfp4"),
        "nvfp4_fa2": False,
        "kv_torch_dtype": torch.float8_e4m3fn if case.kv_dtype.startswith("fp8") else case.dtype,
    }
    return impl
