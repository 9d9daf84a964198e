"""Per-layer settings in the key ``per_layer_config``, as transformers 5.19 writes it (Gemma 4, Step 3.7).

The keys of this object are layer indices, zero-padded to equal width ("05", "11").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.errors import ConfigError
from kvferry.geometry.models.config import ModelConfig
from kvferry.geometry.models.families import RECURRENT, Mixer

_KEY = "per_layer_config"
_KNOWN = frozenset({"head_dim", "num_key_value_heads", "num_attention_heads"})


def layer_overrides(config: ModelConfig) -> Mapping[int, Mapping[str, Any]]:
    """Return the settings of individual layers from ``per_layer_config``, by layer index.

    Raises:
        ConfigError: a layer does not exist, or a setting is unknown and may affect the cache.
    """
    value = config.get(_KEY)
    if value is None:
        return {}
    config.mark_read(_KEY)
    if not isinstance(value, Mapping):
        raise ConfigError(f"config.json: {_KEY} is {value!r}, an object is expected")
    if unnumbered := [key for key in value if not key.isdecimal() or int(key) >= config.layers]:
        raise ConfigError(
            f"config.json: {_KEY} has {', '.join(sorted(unnumbered))} where the number of a layer, below "
            f"{config.layers}, is expected; its KV cache cannot be planned"
        )
    overrides = {int(key): settings for key, settings in value.items()}
    for layer, settings in overrides.items():
        if not isinstance(settings, Mapping):
            raise ConfigError(f"config.json: {_KEY}.{layer} is {settings!r}, an object is expected")
    unknown = {name for settings in overrides.values() for name in settings} - _KNOWN
    # The number of query heads affects the cache only if KV heads or head width are derived from it.
    if not (config.get("num_key_value_heads", "num_attention_groups") and config.get("head_dim")):
        unknown |= {
            "num_attention_heads" for settings in overrides.values() if "num_attention_heads" in settings
        }
    if unknown:
        raise ConfigError(
            f"config.json: {_KEY} has {', '.join(sorted(unknown))}, which may decide what is kept per token, "
            "and kvferry does not know how; its KV cache cannot be planned yet"
        )
    return overrides


def check_layer_overrides(config: ModelConfig, layers: Sequence[Sequence[Mixer]]) -> None:
    """Check that the settings in ``per_layer_config`` are valid, and that none is for a recurrent layer.

    Raises:
        ConfigError: one is not.
    """
    for number, settings in layer_overrides(config).items():
        if settings and not RECURRENT.isdisjoint(layers[number]):
            named = ", ".join(sorted(settings))
            raise ConfigError(
                f"config.json: {_KEY} has {named} of layer {number}, which is recurrent; its KV cache cannot "
                "be planned yet"
            )
