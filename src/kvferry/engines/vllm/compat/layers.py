"""The engine's layer objects: attention layers, sparse indexers, and the order of convolution states."""

from __future__ import annotations

from typing import Any

import torch
from vllm import _custom_ops
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first


def attention_layer(vllm_config: VllmConfig, name: str) -> Any:
    """Return the engine's layer object of that name."""
    return vllm_config.compilation_config.static_forward_context[name]


def conv_channels_first() -> bool:
    """Return True if convolution states are (channels, window), False if they are (window, channels)."""
    return bool(is_conv_state_dim_first())


def is_indexer(layer: Any) -> bool:
    """Return True if the layer only holds the fp8 keys of a sparse indexer, as in DeepSeek V3.2 and GLM-5."""
    return layer.get_attn_backend().get_name() == "DEEPSEEK_V32_INDEXER" and layer.dtype is torch.uint8


def write_index_keys(
    layer: Any, keys: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, group: int
) -> None:
    """Quantise keys of an indexer into its cache, with the operation that vLLM uses on CUDA.

    Args:
        layer: indexer layer (`is_indexer`).
        keys: keys to write, (tokens, width). The width is a multiple of `group`.
        cache: cache of the layer, uint8 of shape (blocks, tokens, bytes).
        slots: position in the cache of each token, int64 of shape (tokens,).
        group: number of elements of a key that share a scale.

    Raises:
        RuntimeError: this backend shuffles its keys.
        AttributeError: this build of vLLM lacks the operation.
    """
    if layer.uses_shuffled_layout:
        raise RuntimeError("its indexer's keys are shuffled")
    _custom_ops.indexer_k_quant_and_cache(keys.to(torch.bfloat16), cache, slots, group, "ue8m0")
