"""Families of `kvferry.tools.serving.tiny` with as few layers and heads as layouts can tell apart.

Triton's interpreter takes seconds for each layer and head. A group of two layers suffices for a cross-layer
layout; a head of Q for each of K and V halves what a kernel is launched for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvferry.tools.serving.tiny import FAMILIES

_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
_SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3": {**_HEADS, "num_hidden_layers": 2},
    "gemma3": {
        **_HEADS,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 32,
    },
    "gptoss": {**_HEADS, "sliding_window": 32},
    "dsv3": {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2},
    "lfm2": {**_HEADS, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "qwen3next": {
        **_HEADS,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "nemotronh": {
        **_HEADS,
        "layers_block_type": ["mamba", "mlp", "full_attention", "mamba", "full_attention", "mlp"],
    },
}
SMALL = {
    f"small-{name}": replace(FAMILIES[name], settings={**FAMILIES[name].settings, **own})
    for name, own in _SETTINGS.items()
}
