"""Facts about this engine's KV that other engines must share, in vLLM's terms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvferry.cache.weights import weights_of
from kvferry.connector.agreement import CACHE_DTYPE, MODEL_DTYPE, WEIGHTS
from kvferry.errors import ConfigError
from kvferry.keys.settings_text import settings_of
from kvferry.transport.messages import Fact


def facts_of(checkpoint: Path, config: Any) -> dict[str, Fact]:
    """Return all that decides the bytes of the KV.

    vLLM states more, such as tables of its rotary modules. A peer compares a fact only if both engines state
    it. Chunks in storage need all facts alike, so vLLM and this engine never take each other's chunks.

    Args:
        checkpoint: folder of the weights.
        config: transformers' configuration of the model.

    Raises:
        ConfigError: there are no weights.
    """
    weights = weights_of(checkpoint)
    if weights is None:
        raise ConfigError(f"no weights in {checkpoint}; name the folder of a checkpoint")
    return {
        WEIGHTS: weights,
        MODEL_DTYPE: "float32",
        CACHE_DTYPE: "float32",
        "quantization": "none",
        "model configuration": settings_of(config.to_dict()),
    }
