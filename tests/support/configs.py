"""A model's `config.json`, as values."""

from __future__ import annotations

DENSE = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "torch_dtype": "bfloat16",
}
"""A small model with full attention in all layers."""
