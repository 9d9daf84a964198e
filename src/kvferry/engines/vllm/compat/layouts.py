"""Memory layouts of the KV cache: those that attention backends take, and the facts that decide for one."""

from __future__ import annotations

from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts


def operators_layout() -> str | None:
    """Return the layout that the operator has set; vLLM then asks no connector."""
    named: str | None = envs.VLLM_KV_CACHE_LAYOUT
    return named


def supported_layouts(vllm_config: VllmConfig) -> list[str]:
    """Return the layouts that every attention backend of the model declares; all if none declares any.

    An engine core with several workers has no layers of its own; it gets the backend that they would choose.
    """
    backends = get_current_attn_backends(vllm_config)
    return [layout.name for layout in get_supported_kv_cache_layouts(backends)]


def declared_layouts(vllm_config: VllmConfig) -> list[str]:
    """Return the layouts that every attention backend declares; empty if a declaration is not reliable.

    None means "any" to vLLM, but MLA backends that declare None need not mean it: the one for CPUs fails in
    its first step over blocks that are not side by side.
    """
    for backend in get_current_attn_backends(vllm_config):
        if backend.is_mla() and backend.supported_kv_cache_layouts() is None:
            return []
    return supported_layouts(vllm_config)


def attention_backends(vllm_config: VllmConfig) -> list[str]:
    """Return the names of the attention backends of the model's layers."""
    return [str(backend.get_name()) for backend in get_current_attn_backends(vllm_config)]


def takes_whole_blocks(vllm_config: VllmConfig) -> bool:
    """Return True if kernels take whole engine blocks: with blocks outermost vLLM does not split them."""
    block = vllm_config.cache_config.block_size
    return all(
        any(
            block % size.base == 0 if isinstance(size, MultipleOf) else block == size
            for size in backend.get_supported_kernel_block_sizes()
        )
        for backend in get_current_attn_backends(vllm_config)
    )


def layers_are_alike(vllm_config: VllmConfig) -> bool:
    """Return True if all layers keep the same for a token.

    That is so with one kind of attention, no draft model and no indexer.
    """
    model = vllm_config.model_config
    text = model.hf_text_config
    return (
        not model.is_hybrid
        and not model.has_noops
        and len(set(getattr(text, "layer_types", None) or ())) < 2
        and getattr(text, "index_topk", None) is None
        and vllm_config.speculative_config is None
    )
