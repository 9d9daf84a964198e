"""The element type of the KV cache that a quantized checkpoint requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvferry.errors import ConfigError
from kvferry.geometry.models.config import ModelConfig

_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo")


def quantized_cache(config: ModelConfig, dtype: str) -> tuple[str, list[str]]:
    """Return (element type of the KV cache, notes for the user).

    If ``auto`` is requested and the model's ``config.json`` names a quantised type for the KV cache, the
    result is this type, and a note says so. Otherwise the result is `dtype` without notes. vLLM's
    `resolve_kv_cache_dtype_string` decides in the same way.

    Args:
        config: content of the model's ``config.json``.
        dtype: requested element type.

    Raises:
        ConfigError: ``config.json`` names a quantised type other than fp8.
    """
    quantization = config.get("quantization_config")
    if dtype != "auto" or not isinstance(quantization, Mapping):
        return dtype, []
    inner = quantization.get("quantization")
    places = (inner, quantization) if isinstance(inner, Mapping) else (quantization,)
    candidates = ((key, place[key]) for key in _KEYS for place in places if place.get(key))
    first = next(candidates, None)
    if first is None:
        return dtype, []
    key, scheme = first
    if _is_fp8(scheme):
        return "fp8", [f"the checkpoint keeps its KV cache in fp8 (quantization_config.{key})"]
    raise ConfigError(
        f"config.json: quantization_config.{key} is {scheme!r}, and kvferry plans only fp8; name the element "
        "type with --dtype"
    )


def _is_fp8(scheme: Any) -> bool:
    if isinstance(scheme, Mapping):
        return scheme.get("num_bits") == 8 and scheme.get("type") == "float"
    return str(scheme).lower() == "fp8"
