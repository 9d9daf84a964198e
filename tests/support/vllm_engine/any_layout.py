"""Lets vLLM's CPU backend declare what its kernels can do: they take strides, only the interior is fixed."""

from __future__ import annotations


def declare() -> None:
    """In this process, before an engine is made in it."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_layout import KVCacheLayout

    layouts = tuple(KVCacheLayout[name] for name in ("LBHNC", "BLHNC", "BHLNC", "LHBNC"))
    CPUAttentionBackend.supported_kv_cache_layouts = classmethod(lambda cls: layouts)
