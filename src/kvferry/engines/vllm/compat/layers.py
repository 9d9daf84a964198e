"""The engine's layer objects: attention layers, sparse indexers, the order of convolution states."""

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
    """Return True if the layer only holds the fp8 keys of a sparse indexer: DeepSeek V3.2, GLM-5."""
    return layer.get_attn_backend().get_name() == "DEEPSEEK_V32_INDEXER" and layer.dtype is torch.uint8


def write_index_keys(
    layer: Any, keys: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, group: int
) -> None:
    """Quantise an indexer's keys into its cache, as vLLM does for CUDA.

    Args:
        layer: indexer layer (`is_indexer`).
        keys: keys, (tokens, width); the width is a multiple of `group`.
        cache: uint8 of shape (blocks, tokens, bytes).
        slots: int64, one per token.
        group: elements of a key per scale.

    Raises:
        RuntimeError: this backend's keys are shuffled.
        AttributeError: there is no such operation here.
    """
    if layer.uses_shuffled_layout:
        raise RuntimeError("its indexer's keys are shuffled")
    _custom_ops.indexer_k_quant_and_cache(keys.to(torch.bfloat16), cache, slots, group, "ue8m0")
