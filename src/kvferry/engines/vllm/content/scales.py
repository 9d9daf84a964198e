"""Scales of a layer's quantised cache that the layer keeps outside of the cache.

Codes in the cache are multiplied by these scales, so the scales are part of what the bytes mean. Other scales
lie inside pages (per token and head, or per group of elements). Those are fields, and move with the pages.
"""

from __future__ import annotations

from typing import Any

import torch

from kvferry.geometry import Scale

_OWN = ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "nvfp4", "nvfp4_4over6")
"""KV cache dtypes whose codes are multiplied by the layer's own scales."""


def scale_of(layer: Any, name: str) -> torch.Tensor:
    """Return the layer's scale of ``k`` or ``v``: float32 on the host, of shape (1,) or (1, heads, 1).

    Return 1 if the layer's KV cache dtype uses no such scale.
    """
    found = getattr(layer, f"_{name}_scale", None)
    if found is None or str(getattr(layer, "kv_cache_dtype", "")) not in _OWN:
        return torch.ones(1)
    scale = found.detach().float().cpu().reshape(-1)
    return scale if scale.numel() == 1 else scale.view(1, -1, 1)


def scales_of(layer: Any) -> tuple[Scale, ...]:
    """Return the scales that decide the meaning of a layer's pages: those that are not 1.

    Args:
        layer: the engine's attention layer, after its weights were loaded.
    """
    found = (
        Scale(name, tuple(float(value) for value in scale_of(layer, name).reshape(-1))) for name in ("k", "v")
    )
    return tuple(scale for scale in found if set(scale.factors) != {1.0})
