"""What every layer of a model keeps, from its ``config.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvferry.errors import ConfigError, GeometryError
from kvferry.geometry.models.attention import attention_stores
from kvferry.geometry.models.config import Config, language_model
from kvferry.geometry.models.dtypes import FLOATS, float_name
from kvferry.geometry.models.families import FAMILIES, RECURRENT, Family, Mixer
from kvferry.geometry.models.pattern import Mixers, mixers
from kvferry.geometry.models.recurrent import recurrent_store
from kvferry.geometry.store import LayerStore, ModelCache

_BETRAYS_STATE = ("mamba", "ssm_", "linear_", "rwkv", "conv_kernel", "conv_L", "state_size", "time_step")
_BETRAYS_UNEVEN = ("block_configs", "num_heads_per_layer", "num_kv_heads_per_layer")


@dataclass(frozen=True, slots=True)
class ModelReading:
    """What a ``config.json`` says about KV cache.

    Attributes:
        cache: what is kept. A layer of the model that keeps two things is two layers of it.
        kept: layers of `cache` per layer of the model; 0 for one that keeps nothing.
        notes: what was assumed, a sentence each.
    """

    cache: ModelCache
    kept: tuple[int, ...]
    notes: tuple[str, ...]


def per_layer(reading: ModelReading) -> Iterator[tuple[LayerStore, ...]]:
    """What each layer of the model keeps, one after the other."""
    first = 0
    for count in reading.kept:
        yield reading.cache.layers[first : first + count]
        first += count


def model_cache(config: Mapping[str, Any], dtype: str = "auto") -> ModelCache:
    """What a model keeps; see `read_model`."""
    return read_model(config, dtype).cache


def read_model(
    config: Mapping[str, Any], dtype: str = "auto", *, name: str = "", draft: bool = False
) -> ModelReading:
    """What a model keeps.

    >>> dense = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
    ...          "num_key_value_heads": 2, "torch_dtype": "bfloat16"}
    >>> [layer.whole_bytes for layer in model_cache(dense).layers]   # K and V, 2 heads, 16 elements, 2 bytes
    [128, 128]

    Args:
        config: the keys of its ``config.json``.
        dtype: element type of the KV cache, as in `dtypes.CACHE_DTYPES`. A floating type is also that of
            everything else that is kept; auto is what the file says.
        name: for people; the model type if empty.
        draft: with the layers of a multi-token prediction module, which keep what the last layer keeps.

    Raises:
        ConfigError: the file does not say what is kept, in one sentence.
    """
    values = language_model(config)
    plain = Config(values, {})
    family = FAMILIES.get(plain.model_type, Family())
    read = Config(values, family.defaults)
    notes = []
    model_dtype, said = _model_dtype(read, dtype)
    notes += said
    if plain.model_type not in FAMILIES:
        notes.append(_unknown(plain))
    layers = _without_shared(read, mixers(read, family))
    if draft:
        layers += _draft_layers(read, layers)
    ssm_dtype = _ssm_dtype(read, family, model_dtype)
    made: dict[Mixer, tuple[LayerStore, ...]] = {}
    try:
        for mixer in {mixer for layer in layers for mixer in layer}:
            if mixer in RECURRENT:
                made[mixer] = (recurrent_store(read, mixer, model_dtype, ssm_dtype),)
            else:
                made[mixer] = attention_stores(read, family, mixer, dtype, model_dtype)
    except GeometryError as error:
        raise ConfigError(f"config.json: {error}") from error
    stores = [tuple(store for mixer in layer for store in made[mixer]) for layer in layers]
    cache = ModelCache(name or plain.model_type, tuple(store for layer in stores for store in layer))
    if not cache.layers:
        raise ConfigError("config.json: no layer keeps anything, so there is nothing to move")
    return ModelReading(cache, tuple(len(layer) for layer in stores), tuple(notes))


def _model_dtype(config: Config, dtype: str) -> tuple[str, list[str]]:
    """What the model is computed in, and what was assumed."""
    if dtype in FLOATS:
        return dtype, []
    value = config.get("dtype", "torch_dtype")
    if value is None:
        return "bfloat16", ["config.json names no element type: bfloat16 is assumed"]
    named = float_name("torch_dtype", value)
    if FLOATS[named] > FLOATS["bfloat16"]:
        return "bfloat16", [f"the checkpoint is {named}, which vLLM serves in bfloat16 unless told otherwise"]
    return named, []


def _ssm_dtype(config: Config, family: Family, model_dtype: str) -> str:
    """Element type of recurrent state, as vLLM chooses it: the file's wish, the family's, the model's."""
    said = config.get("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
    if said is not None and said != "auto":
        return float_name("mamba_ssm_cache_dtype", said)
    return family.ssm_dtype or model_dtype


def _unknown(config: Config) -> str:
    """What is assumed of a family that is not known.

    Raises:
        ConfigError: its keys say that it keeps something other than K and V of every layer.
    """
    name = config.model_type or "unknown"
    for key in config.values:
        if key.startswith(_BETRAYS_STATE) and config.get(key) is not None:
            raise ConfigError(
                f"model type {name} is not known, and {key} in its config.json says that it keeps more than "
                "K and V; its KV cache cannot be planned yet"
            )
    uneven = next((key for key in _BETRAYS_UNEVEN if config.get(key) is not None), None)
    if uneven is not None:
        raise ConfigError(
            f"model type {name} is not known, and {uneven} in its config.json says that its layers differ; "
            "its KV cache cannot be planned yet"
        )
    if config.get("is_encoder_decoder") is True:
        raise ConfigError(f"model type {name} is an encoder-decoder; only decoders can be planned")
    config.number("num_attention_heads", "n_head", "n_heads")
    return f"model type {name} is not known: read as ordinary attention by its keys"


def _without_shared(config: Config, layers: list[Mixers]) -> list[Mixers]:
    """Layers that use an earlier layer's K and V (Gemma 3n and 4) keep nothing."""
    shared = config.maybe("num_kv_shared_layers")
    if not shared:
        return layers
    if shared >= len(layers):
        raise ConfigError(f"config.json: num_kv_shared_layers is {shared} of {len(layers)} layers")
    return [*layers[:-shared], *([()] * shared)]


def _draft_layers(config: Config, layers: list[Mixers]) -> list[Mixers]:
    """Layers of the multi-token prediction module, like the last attention layer.

    Raises:
        ConfigError: the model has none.
    """
    count = config.maybe("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
    attention = [tuple(m for m in layer if m not in RECURRENT) for layer in layers]
    last = next((layer for layer in reversed(attention) if layer), None)
    if count is None or last is None:
        raise ConfigError(
            "config.json names no multi-token prediction layers (num_nextn_predict_layers); leave --mtp away"
        )
    return [last] * count
