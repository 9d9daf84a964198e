"""Derivation of the KV cache of every layer of a model from its ``config.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvferry.common.errors import ConfigError, GeometryError
from kvferry.tools.models.attention import AttentionReader, query_heads
from kvferry.tools.models.config import (
    DTYPES,
    FLOATS,
    ModelConfig,
    check_unread,
    float_name,
    language_model,
    quantized_cache,
)
from kvferry.tools.models.families import (
    FAMILIES,
    RECURRENT,
    Mixer,
    ModelFamily,
    check_decoder,
    check_layer_overrides,
)
from kvferry.tools.models.pattern import Mixers, mixers
from kvferry.tools.models.recurrent import recurrent_store
from kvferry.tools.models.store import LayerCache, ModelCache


@dataclass(frozen=True, slots=True)
class ModelReading:
    """The KV cache that a ``config.json`` describes.

    Attributes:
        kept: number of entries in `cache.layers` for each layer of the model.
        notes: assumptions that were made to derive the cache, one sentence each.
        cache_dtype: element type of the KV cache, one of `config.CACHE_DTYPES`.
    """

    cache: ModelCache
    kept: tuple[int, ...]
    notes: tuple[str, ...]
    cache_dtype: str = "auto"


def per_layer(reading: ModelReading) -> Iterator[tuple[LayerCache, ...]]:
    """Yield the caches of each layer of the model; an empty tuple for a layer without a cache."""
    first = 0
    for count in reading.kept:
        yield reading.cache.layers[first : first + count]
        first += count


def read_model(
    config: Mapping[str, Any], dtype: str = "auto", *, name: str = "", draft: bool = False
) -> ModelReading:
    """Return the KV cache of a model, derived from its ``config.json``.

    >>> dense = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
    ...          "num_key_value_heads": 2, "torch_dtype": "bfloat16"}
    >>> [layer.whole_bytes for layer in read_model(dense).cache.layers]  # K, V, 2 heads, 16 elements, 2 bytes
    [128, 128]

    Args:
        dtype: element type of the KV cache, one of `config.CACHE_DTYPES`. A floating-point type also replaces
            the model's element type. With ``auto``, the file decides.
        draft: True to add the layers for multi-token prediction.

    Raises:
        ConfigError: the cache cannot be derived from the file. The message is one sentence.
    """
    values = language_model(config)
    model_type = str(values.get("model_type") or "")
    family = FAMILIES.get(model_type, ModelFamily())
    read = ModelConfig(values, family.defaults)
    check_decoder(read)
    model_dtype, notes = _model_dtype(read, dtype)
    cache_dtype, quantization_notes = quantized_cache(read, dtype)
    notes += quantization_notes
    if model_type not in FAMILIES:
        notes.append(_unknown(read))
    layers = _without_shared(read, mixers(read, family))
    check_layer_overrides(read, layers)
    if draft:
        layers += _draft_layers(read, layers)
    try:
        stores = _stores(read, family, layers, (cache_dtype, model_dtype))
    except GeometryError as error:
        raise ConfigError(f"config.json: {error}") from error
    heads = query_heads(read)
    if family.recurrent is not None:
        _mark_unused_keys(read, {mixer for layer in layers for mixer in layer})
    # Last, because every lookup above marks its keys as read.
    notes += check_unread(read)
    cache = ModelCache(name or model_type, tuple(store for layer in stores for store in layer), heads)
    if not cache.layers:
        raise ConfigError("config.json: no layer keeps anything, so there is nothing to move")
    return ModelReading(cache, tuple(len(layer) for layer in stores), tuple(notes), cache_dtype)


_ATTENTION_KEYS = ("num_key_value_heads", "head_dim", "attention_head_dim", "kv_channels", "sliding_window")
_STATE_KEYS = (
    "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_expand",
    "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", "expand",
    "mamba_ssm_cache_dtype", "mamba_ssm_dtype", "conv_L_cache", "conv_dim", "conv_dim_out", "block_dim",
)  # fmt: skip


def _mark_unused_keys(config: ModelConfig, used: set[Mixer]) -> None:
    # Otherwise the check for unread keys would reject the file.
    if used <= RECURRENT:
        config.mark_read(*_ATTENTION_KEYS)
    if not used & RECURRENT:
        config.mark_read(*_STATE_KEYS)


def _stores(
    config: ModelConfig, family: ModelFamily, layers: list[Mixers], dtypes: tuple[str, str]
) -> list[tuple[LayerCache, ...]]:
    attention = AttentionReader(config, family, *dtypes)
    ssm_dtype = _ssm_dtype(config, family, dtypes[1])
    recurrent = {
        mixer: (recurrent_store(config, mixer, dtypes[1], ssm_dtype),)
        for mixer in dict.fromkeys(mixer for layer in layers for mixer in layer if mixer in RECURRENT)
    }
    # Draft layers follow the model's layers, and read the per-layer settings of its last one.
    last = config.layers - 1
    return [
        tuple(
            store
            for mixer in layer
            for store in (recurrent.get(mixer) or attention.stores(mixer, min(number, last)))
        )
        for number, layer in enumerate(layers)
    ]


def _model_dtype(config: ModelConfig, dtype: str) -> tuple[str, list[str]]:
    if dtype in FLOATS:
        return dtype, []
    value = config.get(*DTYPES)
    if value is None:
        return "bfloat16", ["config.json names no element type: bfloat16 is assumed"]
    named = float_name("torch_dtype", value)
    if FLOATS[named] > FLOATS["bfloat16"]:
        return "bfloat16", [f"the checkpoint is {named}, which vLLM serves in bfloat16 unless told otherwise"]
    return named, []


def _ssm_dtype(config: ModelConfig, family: ModelFamily, model_dtype: str) -> str:
    """Return the element type of recurrent state, with vLLM's order of precedence."""
    value = config.get("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
    if value is not None and value != "auto":
        return float_name("mamba_ssm_cache_dtype", value)
    return family.ssm_dtype or model_dtype


def _unknown(config: ModelConfig) -> str:
    """Return a note that an unknown model is treated as one with ordinary attention, or raise ConfigError."""
    name = config.model_type or "unknown"
    for key in ("index_head_dim", "compress_ratios", "sparse_attention_config", "block_configs"):
        if config.get(key) is not None:
            raise ConfigError(
                f"model type {name} is not known, and {key} in its config.json says that it keeps more "
                "than K and V; its KV cache cannot be planned yet"
            )
    config.number("num_attention_heads", "n_head", "n_heads")
    return f"model type {name} is not known: read as ordinary attention by its keys"


def _without_shared(config: ModelConfig, layers: list[Mixers]) -> list[Mixers]:
    shared = config.optional_int("num_kv_shared_layers")
    if not shared:
        return layers
    if shared >= len(layers):
        raise ConfigError(
            f"config.json: num_kv_shared_layers is {shared}; it must be below the {len(layers)} layers"
        )
    # The last layers of Gemma 3n and Gemma 4 reuse K and V of earlier layers.
    return [*layers[:-shared], *([()] * shared)]


def _draft_layers(config: ModelConfig, layers: list[Mixers]) -> list[Mixers]:
    """Return the mixers of each layer for multi-token prediction: those of the last attention layer."""
    count = config.optional_int("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
    attention = [tuple(m for m in layer if m not in RECURRENT) for layer in layers]
    last = next((layer for layer in reversed(attention) if layer), None)
    if count is None or last is None:
        raise ConfigError(
            "config.json names no multi-token prediction layers (num_nextn_predict_layers); leave out --mtp"
        )
    return [last] * count
