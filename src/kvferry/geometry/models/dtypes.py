"""Element types of a KV cache, by the names that vLLM gives them."""

from __future__ import annotations

from typing import Any

from kvferry.errors import ConfigError

FLOATS = {"float16": 2, "half": 2, "bfloat16": 2, "float32": 4, "float": 4}
"""Bytes of an element, by floating type of a model."""

SCALED = ("int8_per_token_head", "fp8_per_token_head")
"""Types with one byte per element and, per token and head, a float32 scale after K and one after V."""

PACKED_LATENT = "fp8_ds_mla"
"""Type of a latent of 656 bytes per token: 512 fp8, four float32 scales and 64 bfloat16 for positions."""

CACHE_DTYPES = ("auto", *FLOATS, "fp8", "fp8_e4m3", "fp8_e5m2", *SCALED, PACKED_LATENT)


def element_bytes(cache_dtype: str, model_dtype: str) -> int:
    """Return the bytes of an element of K, V or a latent.

    Args:
        cache_dtype: one of `CACHE_DTYPES`; auto is the model's.
        model_dtype: one of `FLOATS`.

    Raises:
        ConfigError: the type is not known.
    """
    if cache_dtype not in CACHE_DTYPES:
        raise ConfigError(
            f"element type {cache_dtype!r} is not known; choose one of {', '.join(CACHE_DTYPES)}"
        )
    return FLOATS[model_dtype] if cache_dtype == "auto" else FLOATS.get(cache_dtype, 1)


def float_name(name: str, value: Any) -> str:
    """Return the floating type that a ``config.json`` names, also in the form ``torch.bfloat16``.

    Raises:
        ConfigError: it is not a floating type.
    """
    said = str(value).removeprefix("torch.")
    if said not in FLOATS:
        raise ConfigError(f"config.json: {name} is {value!r}, one of {', '.join(FLOATS)} is expected")
    return said
