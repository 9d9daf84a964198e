"""A checkpoint in Mistral's format has the KV cache that vLLM derives from its files."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from vllm.transformers_utils.config import get_config
from vllm.transformers_utils.configs.mistral import adapt_config_dict

from kvferry.common.errors import ConfigError
from kvferry.tools.models import read_model
from kvferry.tools.plan.find import find_config

DENSE: dict[str, Any] = {
    "dim": 64, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "hidden_dim": 128,
    "norm_eps": 1e-5, "vocab_size": 1024, "rope_theta": 1e6, "dtype": "bfloat16",
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "q_lora_rank": 24,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2}
SHARED = {**MOE, "num_shared_experts": 1, "route_every_n": 1, "first_k_dense_replace": 1}
SCALING = {"llama_4_scaling": {"original_max_position_embeddings": 8192, "beta": 0.1}}
VISION = {"hidden_size": 32, "num_hidden_layers": 9, "num_attention_heads": 4, "image_size": 64}
COMPRESSED = {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}
PARAMS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "one head of K and V per query head": {**DENSE, "n_kv_heads": 4},
    "a window": {**DENSE, "sliding_window": 48},
    "windows by layer": {**DENSE, "sliding_window": [None, 48]},
    "experts": {**DENSE, "moe": MOE},
    "latents": {**DENSE, **LATENT, **SCALING},
    "latents and shared experts": {**DENSE, **LATENT, **SCALING, "moe": SHARED},
    "a vision encoder": {**DENSE, "vision_encoder": VISION},
    "a vision encoder by its newer name": {**DENSE, "multimodal": {"vision_encoder_args": VISION}},
    "weights in fp8": {**DENSE, "quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}},
    "KV in fp8": {**DENSE, "quantization": {"quant_method": "compressed_tensors", **COMPRESSED}},
    "pictures, and KV in fp8": {
        **DENSE,
        "vision_encoder": VISION,
        "quantization": {"quant_method": "compressed-tensors", **COMPRESSED},
    },
}  # fmt: skip


def layers(config: Any) -> tuple[Any, ...]:
    return read_model(config).cache.layers


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_plan_derives_the_cache_that_vllm_derives(tmp_path: Path, params: dict[str, Any]) -> None:
    (tmp_path / "params.json").write_text(json.dumps(params))
    by_vllm = adapt_config_dict(deepcopy(params), defaults={}).to_dict()
    assert layers(find_config(str(tmp_path))[1]) == layers(json.loads(json.dumps(by_vllm, default=str)))


@pytest.mark.parametrize("weights", ["consolidated.safetensors", "consolidated-00001-of-2.safetensors", None])
def test_weights_decide_which_of_two_files_counts(tmp_path: Path, weights: str | None) -> None:
    own = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 3,
        "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(own))
    (tmp_path / "params.json").write_text(json.dumps({**DENSE, "max_position_embeddings": 512}))
    if weights:
        (tmp_path / weights).touch()
    by_vllm = get_config(str(tmp_path), trust_remote_code=False).num_hidden_layers
    assert len(layers(find_config(str(tmp_path))[1])) == by_vllm == (4 if weights else 3)


def test_keys_that_only_the_other_file_has_are_taken_from_it(tmp_path: Path) -> None:
    without = {key: value for key, value in DENSE.items() if key != "head_dim"}
    (tmp_path / "params.json").write_text(json.dumps(without))
    (tmp_path / "config.json").write_text(json.dumps({"head_dim": 32, "num_hidden_layers": 9}))
    (tmp_path / "consolidated.safetensors").touch()
    assert layers(find_config(str(tmp_path))[1]) == layers(find_config(str(tmp_path / "params.json"))[1])
    assert read_model(find_config(str(tmp_path))[1]).cache.layers[0].whole_bytes == 2 * 2 * 32 * 2


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"sliding_window": [16, 48]}, "2 sizes, one is expected"),
        ({"multimodal": {"whisper_model_args": {"encoder_args": {"causal": True}}}}, "audio encoder"),
    ],
)
def test_unknown_kinds_are_refused(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    (tmp_path / "params.json").write_text(json.dumps({**DENSE, **more}))
    with pytest.raises(ConfigError, match=words):
        find_config(str(tmp_path))
