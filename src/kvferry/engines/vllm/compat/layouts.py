"""Memory layouts of the KV cache that attention backends support, and facts that decide between them."""

from __future__ import annotations

from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts


def operators_layout() -> str | None:
    """Return the KV cache layout set with ``VLLM_KV_CACHE_LAYOUT``; None if not set."""
    named: str | None = envs.VLLM_KV_CACHE_LAYOUT
    return named


def supported_layouts(vllm_config: VllmConfig) -> list[str]:
    """Return the names of the KV cache layouts that all attention backends of the model support."""
    # If this process has no layers, as in the scheduler, vLLM selects one backend from the configuration.
    backends = get_current_attn_backends(vllm_config)
    return [layout.name for layout in get_supported_kv_cache_layouts(backends)]


def declared_layouts(vllm_config: VllmConfig) -> list[str]:
    """Return the names of the KV cache layouts that all attention backends are certain to support."""
    for backend in get_current_attn_backends(vllm_config):
        # vLLM assumes that a backend without a declaration supports all layouts. This is wrong for some MLA
        # backends: the one for CPUs fails in its first step unless each block is contiguous.
        if backend.is_mla() and backend.supported_kv_cache_layouts() is None:
            return []
    return supported_layouts(vllm_config)


def attention_backends(vllm_config: VllmConfig) -> list[str]:
    """Return the names of the attention backends that the model's layers use."""
    return [str(backend.get_name()) for backend in get_current_attn_backends(vllm_config)]


def takes_whole_blocks(vllm_config: VllmConfig) -> bool:
    """Return True if the kernels of all attention backends can use blocks of the engine's block size."""
    # vLLM splits a block for a kernel that needs smaller ones. It cannot in layouts whose outermost axis is
    # the block, so such layouts must not be used then.
    block = vllm_config.cache_config.block_size
    return all(
        any(
            block % size.base == 0 if isinstance(size, MultipleOf) else block == size
            for size in backend.get_supported_kernel_block_sizes()
        )
        for backend in get_current_attn_backends(vllm_config)
    )


def layers_are_alike(vllm_config: VllmConfig) -> bool:
    """Return True if all layers of the model store the same kind of KV, of the same size per token."""
    model = vllm_config.model_config
    text = model.hf_text_config
    return (
        not model.is_hybrid
        and not model.has_noops
        and len(set(getattr(text, "layer_types", None) or ())) < 2
        and getattr(text, "index_topk", None) is None
        and vllm_config.speculative_config is None
    )
