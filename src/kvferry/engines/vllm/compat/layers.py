"""The engine's layer objects: attention layers, sparse indexers, and the order of convolution states."""

from __future__ import annotations

from typing import Any

import torch
from vllm import _custom_ops
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first


def attention_layer(vllm_config: VllmConfig, name: str) -> Any:
    """Return the layer object that has this name in the engine's model."""
    return vllm_config.compilation_config.static_forward_context[name]


def conv_channels_first() -> bool:
    """Return True if vLLM stores convolution states as (channels, window), False for (window, channels)."""
    return bool(is_conv_state_dim_first())


def is_indexer(layer: Any) -> bool:
    """Return True if a layer's cache holds only the fp8 keys of a sparse indexer (DeepSeek V3.2, GLM-5)."""
    return layer.get_attn_backend().get_name() == "DEEPSEEK_V32_INDEXER" and layer.dtype is torch.uint8


def write_index_keys(
    layer: Any, keys: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, group: int
) -> None:
    """Quantise a sparse indexer's keys into the layer's cache, with the operation that vLLM uses on CUDA.

    Args:
        layer: indexer layer, for which `is_indexer` returns True.
        keys: keys to write, of shape (tokens, width). The width is a multiple of `group`.
        cache: cache of the layer, uint8 of shape (blocks, tokens, bytes).
        slots: position of each token in the cache, int64 of shape (tokens,).
        group: number of elements of a key that share a scale.

    Raises:
        RuntimeError: the layer's backend stores its keys in another order (shuffled).
        AttributeError: this build of vLLM lacks the operation.
    """
    if layer.uses_shuffled_layout:
        raise RuntimeError("its indexer's keys are shuffled")
    _custom_ops.indexer_k_quant_and_cache(keys.to(torch.bfloat16), cache, slots, group, "ue8m0")
