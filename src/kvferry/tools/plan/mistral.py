"""Conversion of Mistral's ``params.json`` to the keys of a ``config.json``.

It follows vLLM 0.32 (``transformers_utils/configs/mistral.py``) for the keys that affect the KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvferry.errors import ConfigError

_NAMES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
}
# Keys that do not affect the KV cache, or that are converted one by one.
_OTHERS = (
    "hidden_dim", "norm_eps", "activation", "tied_embeddings", "max_seq_len", "yarn", "llama_4_scaling",
    "moe", "quantization", "multimodal", "vision_encoder", "use_biases", "causal", "ragged_attention",
    "q_lora_rank",
)  # fmt: skip


def from_params(params: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys and values that a ``config.json`` of a model has, from its ``params.json``.

    >>> from_params({"n_layers": 2, "n_heads": 4, "sliding_window": [8, None]}, {})["layer_types"]
    ['sliding_attention', 'full_attention']

    Args:
        defaults: content of the ``config.json`` beside it, for keys that follow from nothing in ``params``.

    Raises:
        ConfigError: the file describes what kvferry does not know.
    """
    config = {_NAMES.get(key, key): value for key, value in params.items() if key not in _OTHERS}
    moe, media = params.get("moe"), params.get("multimodal") or {}
    if (media.get("whisper_model_args") or {}).get("encoder_args", {}).get("causal"):
        raise ConfigError("params.json: its causal audio encoder keeps KV that kvferry does not know")
    latent = bool(params.get("qk_nope_head_dim")) and not moe
    if params.get("model_type") == "mamba":
        config["model_type"] = "mamba2"
    elif latent or (moe or {}).get("num_shared_experts"):
        config["model_type"] = "deepseek_v3"
    else:
        config["model_type"] = "transformer"
    config |= _windows(params) | _quantization(params)
    if media or params.get("vision_encoder"):
        top = {key: config.pop(key) for key in ("quantization_config",) if key in config}
        config = {"model_type": "pixtral", "text_config": config, **top}
    return {**defaults, **config}


def _windows(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the window and the type of every layer. Mistral gives one window, or a pattern that repeats."""
    window, layers = params.get("sliding_window"), params.get("n_layers")
    if not window or not isinstance(layers, int):
        return {}
    pattern = window if isinstance(window, list) else [window]
    types = ["full_attention" if each is None else "sliding_attention" for each in pattern]
    sizes = {each for each in pattern if each is not None}
    if len(sizes) > 1:
        raise ConfigError(f"params.json: sliding_window has {len(sizes)} sizes, one is expected")
    return {
        "sliding_window": next(iter(sizes), None),
        "layer_types": params.get("layer_types") or types * (layers // len(pattern)),
    }


def _quantization(params: Mapping[str, Any]) -> dict[str, Any]:
    found = params.get("quantization") or {}
    method = str(found.get("quant_method", "")).lower().replace("_", "-")
    # Only llm-compressor's checkpoints can quantise the KV cache. Other kinds concern weights.
    if method != "compressed-tensors":
        return {}
    return {"quantization_config": {**found, "quant_method": method}}
