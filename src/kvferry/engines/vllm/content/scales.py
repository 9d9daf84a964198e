"""Scales of a quantised KV cache that a layer keeps outside of the cache.

The layer multiplies the codes in its cache by these scales, so the codes cannot be understood without them.
Other scales lie inside the pages (per token and head, or per group of elements). Those are fields of the
pages and move with them.
"""

from __future__ import annotations

from typing import Any

import torch

from kvferry.geometry import Scale

_OWN = ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "nvfp4", "nvfp4_4over6")
"""KV cache dtypes whose codes the layer multiplies by scales of its own, outside of the cache."""


def scale_of(layer: Any, name: str) -> torch.Tensor:
    """Return a layer's scale of ``k`` or ``v`` outside of the cache, once its weights are loaded.

    Returns:
        float32 on the host, of shape (1,) or (1, heads, 1). The scale is 1 if the layer's KV cache dtype uses
        no such scale.
    """
    # Layers have the attribute also if their cache is not quantised.
    found = getattr(layer, f"_{name}_scale", None)
    if found is None or str(getattr(layer, "kv_cache_dtype", "")) not in _OWN:
        return torch.ones(1)
    scale = found.detach().float().cpu().reshape(-1)
    return scale if scale.numel() == 1 else scale.view(1, -1, 1)


def scales_of(layer: Any) -> tuple[Scale, ...]:
    """Return the scales of `scale_of` that are not 1."""
    found = (
        Scale(name, tuple(float(value) for value in scale_of(layer, name).reshape(-1))) for name in ("k", "v")
    )
    return tuple(scale for scale in found if set(scale.factors) != {1.0})
