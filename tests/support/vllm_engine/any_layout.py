"""Lets vLLM's CPU backends declare what their kernels can do: they take strides, only the interior is fixed.

With MLA, vLLM's kernel reads latents by their strides, but its Python that writes them does not: that is
replaced.
"""

from __future__ import annotations

from typing import Any

LATENTS = ("LBNHC", "LHBNC", "BLNHC", "BLHNC", "BHLNC")
"""Layouts of MLA, most preferred first. There is one head, so a page is contiguous in all of them."""


def declare() -> None:
    """In this process, before an engine is made in it."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl
    from vllm.v1.kv_cache_layout import KVCacheLayout

    layouts = tuple(KVCacheLayout[name] for name in ("LBHNC", "BLHNC", "BHLNC", "LHBNC"))
    CPUAttentionBackend.supported_kv_cache_layouts = classmethod(lambda cls: layouts)
    of_latents = tuple(KVCacheLayout[name] for name in LATENTS)
    CPUMLABackend.supported_kv_cache_layouts = classmethod(lambda cls: of_latents)
    CPUMLAImpl.do_kv_cache_update = _write_latents


def _write_latents(self: Any, latents: Any, rotary: Any, cache: Any, slots: Any, *_: Any) -> None:
    """Write as vLLM's operation does, whatever lies between two blocks."""
    import torch

    if not cache.numel():
        return
    rows = torch.cat((latents, rotary.flatten(1)), 1).to(cache.dtype)
    slots = slots.flatten().long()
    block, row = slots // cache.shape[1], slots % cache.shape[1]
    cache[block[slots >= 0], row[slots >= 0]] = rows[: len(slots)][slots >= 0]
