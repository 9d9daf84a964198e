"""Tiny checkpoints of MiMo: Qwen2's layers, and modules that predict the tokens after the next one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvferry.serving.tiny import FAMILIES, Family, tiny_checkpoint, trained_tokenizer
from kvferry.serving.tiny.checkpoint import _write
from support.vllm_engine.small import SMALL

_SCALE = 0.08
MODULES = {"mimo": 1, "mimo3": 3}
"""How many modules each has. Of three, vLLM runs the first alone, but schedules as for all."""


def family_of(name: str) -> Family:
    """A family of `kvferry.serving.tiny` or of `small`, or MiMo."""
    return _mimo(MODULES[name]) if name in MODULES else (SMALL | FAMILIES)[name]


def checkpoint_of(name: str, folder: Path) -> Path:
    """Write the checkpoint of such a family if it is not there; its folder."""
    if name in FAMILIES:
        return tiny_checkpoint(name, folder)
    model = folder / name
    if not model.exists():
        model.mkdir(parents=True)
        _write(family_of(name), trained_tokenizer(folder), model)
        if name in MODULES:
            _add_modules(model, MODULES[name])
    return model


def _mimo(modules: int) -> Family:
    return Family(
        name="mimo",
        groups="full attention",
        config="Qwen2Config",
        settings={"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False},
        engine_reads={"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": modules},
    )


def _add_modules(model: Path, modules: int) -> None:
    """Give a checkpoint modules of random weights."""
    import torch
    from safetensors.torch import load_file, save_file

    path = model / "model.safetensors"
    weights: dict[str, Any] = load_file(path)
    size = json.loads((model / "config.json").read_text())["hidden_size"]
    generator = torch.Generator().manual_seed(1)
    like = {
        name.removeprefix("model.layers.0."): weight
        for name, weight in weights.items()
        if name.startswith("model.layers.0.")
    }
    for number in range(modules):
        own = {name: torch.ones(size) for name in ("token_layernorm.weight", "hidden_layernorm.weight")}
        own["final_layernorm.weight"] = torch.ones(size)
        own["input_proj.weight"] = torch.randn(size, 2 * size, generator=generator) * _SCALE
        for name, weight in like.items():
            drawn = torch.randn(weight.shape, generator=generator) * _SCALE
            own[name] = drawn if weight.ndim > 1 else weight.clone()
        weights |= {f"model.mtp_layers.{number}.{name}": one.to(torch.bfloat16) for name, one in own.items()}
    save_file(weights, path, {"format": "pt"})
