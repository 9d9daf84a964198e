"""The element type of the KV cache that a quantized checkpoint requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvferry.errors import ConfigError
from kvferry.geometry.models.config import ModelConfig

_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo")
_TYPES = ("fp8", "nvfp4")


def quantized_cache(config: ModelConfig, dtype: str) -> tuple[str, list[str]]:
    """Return (element type of the KV cache, notes for the user).

    If ``auto`` is requested and the quantization config of a ModelOpt or llm-compressor checkpoint names a
    type for the KV cache, the result is this type, and a note says so. vLLM decides in the same way:
    `resolve_kv_cache_dtype_string` for ModelOpt, and its attention layers for llm-compressor.

    Raises:
        ConfigError: the checkpoint names a quantised type other than fp8.
    """
    quantization = config.get("quantization_config")
    if dtype != "auto" or not isinstance(quantization, Mapping):
        return dtype, []
    key, found = _requested_type(quantization)
    if found is None:
        return dtype, []
    if found == "fp8":
        return "fp8", [f"the checkpoint keeps its KV cache in fp8 (quantization_config.{key})"]
    raise ConfigError(
        f"config.json: quantization_config.{key} asks for {found}, and kvferry plans only fp8; name the "
        "element type with --dtype"
    )


def _requested_type(quantization: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return (key that names the type of the KV cache, type). The type is None if vLLM takes the model's."""
    method = str(quantization.get("quant_method") or "").lower().replace("_", "-")
    if method == "compressed-tensors":  # of llm-compressor
        return _KEYS[0], None if quantization.get(_KEYS[0]) is None else "fp8"
    producer, inner = quantization.get("producer"), quantization.get("quantization")
    if not (
        method.startswith("modelopt")
        or (isinstance(producer, Mapping) and producer.get("name") == "modelopt")
        or (isinstance(inner, Mapping) and "modelopt_quant_config" in inner)
    ):
        return "", None
    places = (inner, quantization) if isinstance(inner, Mapping) else (quantization,)
    candidates = ((key, place[key]) for key in _KEYS for place in places if place.get(key))
    key, scheme = next(candidates, ("", None))
    return key, _type_of(scheme)


def _type_of(scheme: Any) -> str | None:
    """Return the type that a ModelOpt checkpoint names; None if vLLM does not know it."""
    if isinstance(scheme, Mapping):
        if scheme.get("type") != "float":
            return None
        is_fp8 = scheme.get("num_bits") == 8 and scheme.get("dynamic") is False
        return "fp8" if is_fp8 else "nvfp4" if scheme.get("num_bits") == 4 else None
    return next((name for name in _TYPES if name == str(scheme).lower()), None)
