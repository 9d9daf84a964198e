"""Element types of a KV cache, with vLLM's names."""

from __future__ import annotations

from typing import Any

from kvferry.errors import ConfigError

# Bytes of one element of each floating-point type that a model may compute in.
FLOATS = {"float16": 2, "half": 2, "bfloat16": 2, "float32": 4, "float": 4}

# Types with one byte per element, and one float32 scale per token and head, for K and for V each.
SCALED = ("int8_per_token_head", "fp8_per_token_head")

# Packed type of an MLA latent: 512 fp8 elements, 4 float32 scales and 64 bfloat16 elements for positions.
# That is 656 bytes per token.
PACKED_LATENT = "fp8_ds_mla"

CACHE_DTYPES = ("auto", *FLOATS, "fp8", "fp8_e4m3", "fp8_e5m2", *SCALED, PACKED_LATENT)


def element_bytes(cache_dtype: str, model_dtype: str) -> int:
    """Return the bytes of one element of K, V or an MLA latent; ``auto`` stands for `model_dtype`.

    Raises:
        ConfigError: `cache_dtype` is unknown.
    """
    if cache_dtype not in CACHE_DTYPES:
        raise ConfigError(
            f"element type {cache_dtype!r} is not known; choose one of {', '.join(CACHE_DTYPES)}"
        )
    return FLOATS[model_dtype] if cache_dtype == "auto" else FLOATS.get(cache_dtype, 1)


def float_name(name: str, value: Any) -> str:
    """Return the floating-point type that a ``config.json`` gives, without the prefix ``torch.``.

    Raises:
        ConfigError: the value of the key `name` is not a known floating-point type.
    """
    plain_name = str(value).removeprefix("torch.")
    if plain_name not in FLOATS:
        raise ConfigError(f"config.json: {name} is {value!r}, one of {', '.join(FLOATS)} is expected")
    return plain_name
