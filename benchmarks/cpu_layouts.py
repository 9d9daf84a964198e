"""KV cache layouts of vLLM's CPU backend, for benchmarks that compare layouts."""

from __future__ import annotations

PER_LAYER = "LBHNC"
CPU_LAYOUTS = (PER_LAYER, "BLHNC", "BHLNC")
"""Layouts that vLLM's CPU kernels can work with. In all but the first, a block is contiguous over layers."""


def declare_layouts() -> None:
    """Let vLLM's CPU backend accept all of `CPU_LAYOUTS`. Call this before an engine starts.

    The backend declares only the first. Its kernels take the strides of the cache as arguments, and need only
    the tokens and the content of a head in a block to be contiguous.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend  # noqa: PLC0415 - slow
    from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: PLC0415

    layouts = tuple(KVCacheLayout[name] for name in CPU_LAYOUTS)
    CPUAttentionBackend.supported_kv_cache_layouts = classmethod(lambda _: layouts)
