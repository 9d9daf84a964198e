"""Facts about this engine's KV that other engines must share, under the names that vLLM's connector uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvferry.cache.weights import weights_of
from kvferry.common.errors import ConfigError
from kvferry.connector.content import CACHE_DTYPE, MODEL_DTYPE, WEIGHTS
from kvferry.keys.namespace import settings_of
from kvferry.transport.messages import Fact


def facts_of(checkpoint: Path, config: Any) -> dict[str, Fact]:
    """Return the facts about this engine that decide the bytes of its KV, by name.

    Peers compare these facts before they exchange KV. A fact is compared only if both engines state it.
    kvferry's connector for vLLM states more facts, such as tables of rotary modules. Stored chunks are found
    only by engines that state exactly the same facts, so vLLM and this engine never use each other's chunks.

    Args:
        checkpoint: folder of the weights.
        config: transformers' configuration of the model.

    Raises:
        ConfigError: the folder has no weights.
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
