"""CUDA's cache-write operations in torch, as the kernels of vLLM's ``csrc`` write.

`reshape_and_cache_flash`, `concat_and_cache_mla` and `indexer_k_quant_and_cache` as in ``cache_kernels.cu``;
the NVFP4 branch as in ``nvfp4_kv_cache_kernels.cu``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

FP8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Scatter (tokens, heads, width) into caches of (blocks, tokens, heads, width), by their strides."""
    for source, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        if kv_cache_dtype.startswith("nvfp4"):
            _nvfp4(source, cache, slot_mapping, scale, swizzled=cache is value_cache)
            continue
        block, offset = slot_mapping // cache.shape[1], slot_mapping % cache.shape[1]
        cache.view(_raw(cache))[block, offset] = _codes(source, cache, kv_cache_dtype, scale)


def _raw(cache: torch.Tensor) -> torch.dtype:
    return torch.uint8 if cache.dtype.itemsize == 1 else cache.dtype


def _codes(source: torch.Tensor, cache: torch.Tensor, kv_dtype: str, scale: torch.Tensor) -> torch.Tensor:
    if kv_dtype not in FP8:
        return source.to(cache.dtype)
    factor = scale.float().reshape(-1)
    if factor.numel() > 1:
        factor = factor.view(1, -1, 1)
    most = torch.finfo(FP8[kv_dtype]).max
    return (source.float() / factor).clamp(-most, most).to(FP8[kv_dtype]).view(torch.uint8)


def _nvfp4(
    source: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, scale: torch.Tensor, *, swizzled: bool
) -> None:
    """Write codes, then scales behind the codes of all heads and tokens of the side."""
    tokens, heads, width = source.shape
    block_tokens, data, groups = cache.shape[1], width // 2, width // 16
    assert cache.stride(2) > cache.stride(1), "the kernel for data-centre Blackwell keeps heads outermost"
    grouped = source.float().view(tokens, heads, groups, 16) / scale.float()
    scales = (grouped.abs().amax(-1) / 6).to(torch.float8_e4m3fn)
    scaled = grouped / scales.float().clamp(min=1e-8).unsqueeze(-1)
    code = (scaled.abs().unsqueeze(-1) - _E2M1).abs().argmin(-1) + 8 * (scaled < 0)
    code = code.view(tokens, heads, data, 2).to(torch.uint8)
    packed = code[..., 0] | code[..., 1] << 4
    page = cache.as_strided(
        (cache.shape[0], heads * block_tokens * (data + groups)), (cache.stride(0), 1), cache.storage_offset()
    )
    behind = heads * block_tokens * data
    t, g = (slots % block_tokens)[:, None, None], torch.arange(groups)
    head = torch.arange(heads)[None, :, None]
    row, column = t.expand(tokens, heads, groups), g.expand(tokens, heads, groups)
    if swizzled:
        row, column = t // 4 * 4 + g // (groups // 4), g % (groups // 4) * 4 + t % 4
    at_scales = behind + (head * block_tokens + row) * groups + column
    at_codes = (head * block_tokens + t) * data + torch.arange(data)
    block = (slots // block_tokens)[:, None, None]
    page[block, at_codes] = packed
    page[block, at_scales] = scales.view(torch.uint8)


def concat_and_cache_mla(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    scale: torch.Tensor,
) -> None:
    """Scatter latents and rope values into (blocks, tokens, bytes or elements)."""
    block, offset = slot_mapping // kv_cache.shape[1], slot_mapping % kv_cache.shape[1]
    if kv_cache_dtype == "fp8_ds_mla":
        tiles = kv_c.float().view(len(kv_c), 4, 128)
        scales = tiles.abs().amax(-1) / 448
        codes = (tiles / scales.unsqueeze(-1)).to(torch.float8_e4m3fn).view(len(kv_c), 512).view(torch.uint8)
        parts = codes, scales.view(torch.uint8).view(len(kv_c), 16), k_pe.contiguous().view(torch.uint8)
        kv_cache[block, offset] = torch.cat(parts, dim=-1)
        return
    if kv_cache_dtype == "nvfp4_ds_mla":
        raise NotImplementedError("nvfp4_ds_mla is not emulated")
    both = torch.cat((kv_c, k_pe), dim=-1)
    kv_cache.view(_raw(kv_cache))[block, offset] = _codes(both, kv_cache, kv_cache_dtype, scale)


def indexer_k_quant_and_cache(
    k: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, quant_block_size: int, scale_fmt: str
) -> None:
    """Scatter keys into (blocks, tokens, bytes): codes of all tokens of a block, then their scales."""
    (count, width), tokens = k.shape, kv_cache.shape[1]
    grouped = k.float().view(count, -1, quant_block_size)
    scales = grouped.abs().amax(-1).clamp(min=1e-4) / 448
    if scale_fmt == "ue8m0":
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    codes = (grouped / scales.unsqueeze(-1)).to(torch.float8_e4m3fn).view(torch.uint8).view(count, width)
    assert kv_cache.dtype is torch.uint8
    page = kv_cache.as_strided(
        (len(kv_cache), tokens * kv_cache.shape[2]), (kv_cache.stride(0), 1), kv_cache.storage_offset()
    )
    block, offset = (slot_mapping // tokens)[:, None], (slot_mapping % tokens)[:, None]
    page[block, offset * width + torch.arange(width)] = codes
    scale_bytes = 4 * scales.shape[1]
    at = tokens * width + offset * scale_bytes + torch.arange(scale_bytes)
    page[block, at] = scales.contiguous().view(torch.uint8)


def install(patch: Any) -> None:
    """Make the operations what vLLM calls.

    Args:
        patch: pytest's monkeypatch, or what sets attributes as it does.
    """
    from vllm import _custom_ops
    from vllm.v1.attention.backends import flash_attn

    def latents(*args: Any, kv_cache_dtype: str, scale: torch.Tensor) -> None:
        concat_and_cache_mla(*args, kv_cache_dtype, scale)

    operations = SimpleNamespace(reshape_and_cache_flash=reshape_and_cache_flash)
    patch.setitem(torch.ops.__dict__, "_C_cache_ops", operations)
    for module in (_custom_ops, flash_attn):
        patch.setattr(module, "reshape_and_cache_flash", reshape_and_cache_flash, raising=False)
    patch.setattr(_custom_ops, "concat_and_cache_mla", latents)
    patch.setattr(_custom_ops, "indexer_k_quant_and_cache", indexer_k_quant_and_cache)
