"""Ways to speculate, with tiny draft models where a way needs one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TOKENS = 3
"""Drafted at once."""
_SCALE = 0.08


def speculation(method: str, model: str) -> dict[str, Any]:
    """``speculative_config`` of an engine; empty for no method.

    Args:
        method: ``ngram``, ``itself`` (the model drafts for itself: its drafts are accepted while what its
            cache holds is right), ``eagle`` or ``other eagle`` (other weights), ``mtp`` (the model's own
            modules).
        model: folder of its checkpoint.
    """
    if not method:
        return {}
    config: dict[str, Any] = {"num_speculative_tokens": TOKENS}
    if method == "ngram":
        return {**config, "method": method, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
    if method == "mtp":
        return {**config, "method": method}
    if method == "itself":
        return {**config, "method": "draft_model", "model": model}
    return {**config, "method": "eagle", "model": _eagle(Path(model), 1 if method == "eagle" else 2)}


def _eagle(model: Path, seed: int) -> str:
    """An EAGLE draft of one Llama layer that fits a tiny model."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = model.with_name(f"{model.name}-eagle-{seed}")
    config = json.loads((model / "config.json").read_text())
    wanted = ("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings", "rms_norm_eps")
    own = {
        **{name: config[name] for name in wanted if name in config},
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 1,
    }
    if not folder.exists():
        torch.manual_seed(seed)
        size = own["hidden_size"]
        weights = {"fc.weight": torch.randn(size, 2 * size) * _SCALE}
        for name, weight in LlamaForCausalLM(LlamaConfig(**own)).named_parameters():
            if name.startswith("model.layers.0.") and "input_layernorm" not in name:
                drawn = torch.randn(weight.shape) * _SCALE if weight.ndim > 1 else weight.detach()
                weights[name.removeprefix("model.")] = drawn
        folder.mkdir()
        save_file(
            {name: weight.to(torch.bfloat16) for name, weight in weights.items()},
            folder / "model.safetensors",
        )
        about = {**own, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(about))
    return str(folder)
