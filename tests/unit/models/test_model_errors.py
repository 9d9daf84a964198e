"""A config.json that does not say what is kept is refused in one sentence."""

from __future__ import annotations

import pytest

from kvferry.common.errors import ConfigError
from kvferry.tools.models import read_model

DENSE = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"num_hidden_layers": None}, "has no num_hidden_layers or n_layer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, a whole number of at least 1"),
        ({"num_hidden_layers": "four"}, "num_hidden_layers is 'four'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_attention_heads": None, "num_key_value_heads": None}, "has no num_attention_heads or n_head"),
        ({"hidden_size": 66}, "hidden_size 66 is no multiple of num_attention_heads 4; add head_dim"),
        ({"torch_dtype": "int4"}, "torch_dtype is 'int4', one of float16"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 4 layers"),
        ({"layer_types": 7}, "layer_types has 7 for 4 layers"),
        ({"layer_types": ["full_attention", "psychic"] * 2}, "layer_types has 'psychic', which is none of"),
        (
            {"layer_types": ["linear_attention"] * 4},
            "names recurrent layers, but what they keep is not known",
        ),
        ({"kv_lora_rank": 512}, "has no qk_rope_head_dim"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4; it must be below the 4 layers"),
        ({"model_type": "brand_new", "mamba_d_state": 16}, "brand_new: mamba_d_state may decide"),
        ({"model_type": "brand_new", "block_configs": [{}]}, "brand_new is not known, and block_configs"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "t5 is an encoder-decoder"),
        (
            {
                "model_type": "kimi_linear",
                "linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [2, 3]},
            },
            "name 2 and 2 layers, but together they must be 1 to 4",
        ),
        (
            {"model_type": "lfm2", "layer_types": ["conv"] * 4, "conv_L_cache": 1},
            "over 1 tokens keeps nothing",
        ),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "----"},
            "no layer keeps anything, so there is nothing to move",
        ),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M?*-"}, r"has '\?', which is none of"),
        (
            {"model_type": "falcon_h1", "mamba_d_ssm": 100, "mamba_n_heads": 4, "mamba_d_head": 32},
            "4 state heads of 32 are not the 100 channels",
        ),
        (
            {"layer_types": [["full_attention"]] * 4},
            r"layer_types has \['full_attention'\], which is none of",
        ),
        ({"attn_type_list": [2] * 4}, "attn_type_list has 2, which is none of 1"),
        ({"attn_type_list": "1111"}, "attn_type_list has '1', which is none of 1"),
        ({"attn_type_list": [{}] * 4}, "attn_type_list has {}, which is none of 1"),
        (
            {"model_type": "gemma4_text", "per_layer_config": {"0": 5}},
            "per_layer_config.0 is 5, an object is",
        ),
        (
            {"model_type": "kimi_linear", "linear_attn_config": {"kda_layers": 4}},
            "linear_attn_config.kda_layers is 4, a list of layer numbers is expected",
        ),
        (
            {
                "model_type": "kimi_linear",
                "linear_attn_config": {"kda_layers": ["1"], "full_attn_layers": [2]},
            },
            r"linear_attn_config.kda_layers is \['1'\], a list of layer numbers is expected",
        ),
        (
            {**LATENT, "model_type": "deepseek_v32", "index_head_dim": 128, "index_topk_pattern": 4},
            "index_topk_pattern is 4, a letter per layer is expected",
        ),
    ],
)
def test_error_names_the_wrong_setting(changed, says):
    with pytest.raises(ConfigError, match=says) as raised:
        read_model({**DENSE, **changed})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("more", "dtype", "says"),
    [
        ({}, "int3", "element type 'int3' is not known; choose one of auto, float16"),
        ({}, "fp8_ds_mla", "is for latents"),
        (LATENT, "fp8_per_token_head", "is for K and V"),
    ],
)
def test_an_element_type_that_does_not_fit_is_named(more, dtype, says):
    with pytest.raises(ConfigError, match=says):
        read_model({**DENSE, **more}, dtype)
