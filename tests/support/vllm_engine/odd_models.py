"""A tiny checkpoint of a model that derives something from `max_model_len`."""

from __future__ import annotations

from pathlib import Path

from kvferry.serving.tiny import Family, trained_tokenizer
from kvferry.serving.tiny.checkpoint import _write

_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "hidden_size": 128}

PHI3 = Family(
    name="phi3",
    groups="full attention",
    config="Phi3Config",
    settings={
        **_ATTENTION,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 512,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 16,
            "long_factor": [1.0 + n / 2 for n in range(16)],
        },
        "tie_word_embeddings": True,
    },
    scale=0.12,
    embedding_scale=0.02,
)
"""LongRoPE: factors for long prompts where `max_model_len` is beyond 512."""


def checkpoint(family: Family, folder: Path) -> Path:
    """Write a checkpoint; its folder."""
    model = folder / family.name
    if not model.exists():
        model.mkdir(parents=True)
        _write(family, trained_tokenizer(folder), model)
    return model
