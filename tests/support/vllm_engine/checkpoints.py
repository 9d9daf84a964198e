"""Tiny checkpoints: those of `kvferry.tools.serving.tiny`, and those of families that only tests have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from kvferry.tools.serving.tiny import FAMILIES, Family, tiny_checkpoint, trained_tokenizer
from kvferry.tools.serving.tiny.checkpoint import _write
from support.vllm_engine.small import SMALL

_SCALE = 0.08
MODULES = {"mimo": 1, "mimo3": 3}
"""How many modules each has. Of three, vLLM runs the first alone, but schedules as for all."""


def _mimo(modules: int) -> Family:
    """Return MiMo: Qwen2's layers, and modules that predict the tokens after the next one."""
    return Family(
        name="mimo",
        groups="full attention",
        config="Qwen2Config",
        settings={"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False},
        engine_reads={"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": modules},
    )


_PHI3 = Family(
    name="phi3",
    groups="full attention",
    config="Phi3Config",
    settings={
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_size": 128,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 512,
        # LongRoPE derives from `max_model_len`: beyond 512 it has the factors for long prompts.
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
_QWEN3_5 = Family(
    # Not one of kvferry's: vLLM imports it along with its images, for which it needs torchvision.
    name="qwen3_5",
    groups="3 gated delta net, 1 full attention",
    config="Qwen3_5TextConfig",
    settings={
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "mamba_ssm_dtype": "float32",
    },
    dtype="bfloat16",
)
_DSV4 = Family(
    # Not one of kvferry's: vLLM runs it on a CPU only with Triton's interpreter, by the second runner.
    name="dsv4",
    groups="3 windows of latents, 2 compressed latents, an indexer, 3 windows of a compressor",
    config="DeepseekV4Config",
    # Sizes that vLLM's kernels for CPUs take; no smaller ones are among them for heads, latents and experts.
    settings={
        "num_hidden_layers": 3,
        "num_attention_heads": 64,
        "head_dim": 512,
        "compress_ratios": [0, 4, 128],
        "sliding_window": 128,
        "q_lora_rank": 128,
        "o_lora_rank": 64,
        "index_n_heads": 64,
        "index_topk": 512,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 64,
        "num_hash_layers": 0,
    },
    engine_reads={"compress_ratios": [0, 4, 128], "num_hash_layers": 0, "topk_method": "noaux_tc"},
    dtype="bfloat16",
    scale=0.2,
    engine={"max_model_len": 1024, "tokenizer_mode": "auto"},
)
_OF_TESTS: Mapping[str, Family] = MappingProxyType(
    SMALL
    | {"phi3": _PHI3, "qwen3_5": _QWEN3_5, "dsv4": _DSV4}
    | {name: _mimo(modules) for name, modules in MODULES.items()}
)


def family_of(name: str) -> Family:
    """A family of `kvferry.tools.serving.tiny`, or of tests."""
    return _OF_TESTS.get(name) or FAMILIES[name]


def checkpoint_of(name: str, folder: Path) -> Path:
    """Write the checkpoint of such a family if it is not there; its folder."""
    if name == "dsv4" and "amx_tile" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("vLLM's kernels for DeepSeek V4 on CPUs need AMX")
    if name not in _OF_TESTS:
        return tiny_checkpoint(name, folder)
    model = folder / name
    if not model.exists():
        model.mkdir(parents=True)
        _write(_OF_TESTS[name], trained_tokenizer(folder), model)
        if name in MODULES:
            _add_modules(model, MODULES[name])
        if name == "dsv4":
            _write_as_published(model)
    return model


def _write_as_published(model: Path) -> None:
    """Give weights and settings of DeepSeek V4 the names of published files, which vLLM reads."""
    from safetensors.torch import load_file, save_file

    config = json.loads((model / "config.json").read_text())
    for name in ("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters"):
        del config[name]
    (model / "config.json").write_text(json.dumps(config))

    path = model / "model.safetensors"
    names = {"model.": "", "embed_tokens": "embed", "hc_head.hc_": "hc_head_", "attn.norm": "attn.kv_norm"}
    weights = {}
    for name, weight in load_file(path).items():
        for old, new in names.items():
            name = name.replace(old, new)  # noqa: PLW2901 - one step of several
        weights[name] = weight
    save_file(weights, path, {"format": "pt"})


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
