"""What recurrent layers keep, by family, with sizes computed by hand; and which layers they are."""

from __future__ import annotations

from kvferry.geometry import GroupKind
from kvferry.tools.models import per_layer, read_model

FULL, MLA, STATE = GroupKind.FULL, GroupKind.MLA, GroupKind.STATE
ATTENTION = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "torch_dtype": "bfloat16"}
KV = 2 * 2 * 16 * 2


def pattern(config):
    """A letter per thing kept, a dot for a layer that keeps nothing."""
    letters = {STATE: "S", FULL: "F", MLA: "M", GroupKind.SLIDING: "W"}
    layers = per_layer(read_model(config))
    return " ".join("".join(letters[store.kind] for store in stores) or "." for stores in layers)


def state(config):
    """Fields of the recurrent layers, all alike: name to (element bytes, heads, elements per head)."""
    (store,) = {layer for layer in read_model(config).cache.layers if layer.kind is STATE}
    return {f.name: (f.item_bytes, f.heads, f.head_bytes // f.item_bytes) for f in store.fields}


NEMOTRON = {
    **ATTENTION, "model_type": "nemotron_h", "num_hidden_layers": 5, "hybrid_override_pattern": "ME*-M",
    "mamba_num_heads": 8, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 16, "conv_kernel": 4,
}  # fmt: skip


def test_nemotron_h_is_spelled_in_letters_and_keeps_its_state_in_float32():
    assert pattern(NEMOTRON) == "S . F . S"
    assert state(NEMOTRON) == {
        "conv.x": (2, 8, 32 * 3),
        "conv.b": (2, 2, 16 * 3),
        "conv.c": (2, 2, 16 * 3),
        "ssm": (4, 8, 32 * 16),
    }
    # conv 3 x (256 + 2 x 2 x 16) x 2 bytes, state 8 x 32 x 16 x 4 bytes
    assert {layer.whole_bytes for layer in read_model(NEMOTRON).cache.layers} == {1920 + 16384, KV}


def test_a_file_may_name_the_type_of_its_state():
    assert state({**NEMOTRON, "mamba_ssm_cache_dtype": "bfloat16"})["ssm"][0] == 2
    assert state({**NEMOTRON, "mamba_ssm_cache_dtype": "auto"})["ssm"][0] == 4


def test_nemotron_h_as_newer_files_list_it():
    words = ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"]
    assert pattern({**NEMOTRON, "hybrid_override_pattern": None, "layer_types": words}) == "S . F . S"
    # transformers 5 writes no number of layers.
    assert pattern({**NEMOTRON, "num_hidden_layers": None, "layer_types": words}) == "S . F . S"
    words = ["mamba", "moe", "attention", "mlp", "mamba"]
    assert pattern({**NEMOTRON, "hybrid_override_pattern": None, "layers_block_type": words}) == "S . F . S"


def test_granite_says_heads_and_expansion():
    granite = {
        **ATTENTION, "model_type": "granitemoehybrid", "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 4, "mamba_d_head": "auto",
        "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
    }  # fmt: skip
    assert pattern(granite) == "S F S"
    assert state(granite)["conv.x"] == (2, 4, 32 * 3)
    assert state(granite)["ssm"] == (2, 4, 32 * 16)


def test_falcon_h1_keeps_state_beside_attention_in_every_layer():
    falcon = {
        **ATTENTION, "model_type": "falcon_h1", "num_hidden_layers": 2, "mamba_d_ssm": 256,
        "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16,
        "mamba_d_conv": 4, "mamba_expand": 2, "attn_layer_indices": None,
    }  # fmt: skip
    assert pattern(falcon) == "SF SF"
    assert state(falcon)["conv.b"] == (2, 1, 16 * 3)


def test_zamba2_shares_one_attention_among_hybrid_layers():
    zamba = {
        **ATTENTION, "model_type": "zamba2", "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "mamba"], "n_mamba_heads": 8, "mamba_headdim": 16,
        "mamba_ngroups": 1, "mamba_d_state": 16, "mamba_d_conv": 4,
        "mamba_expand": 2, "attention_head_dim": 16,
    }  # fmt: skip
    assert pattern(zamba) == "S SF S"
    # What published files say besides decides nothing, although it sounds so.
    more = {"kv_channels": 8, "attention_hidden_size": 128, "use_shared_attention_adapter": False}
    assert read_model({**zamba, **more}).cache == read_model(zamba).cache


def test_bamba_numbers_its_attention_layers():
    bamba = {
        **ATTENTION, "model_type": "bamba", "num_hidden_layers": 4, "attn_layer_indices": [2],
        "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16,
        "mamba_d_conv": 4, "mamba_expand": 2,
    }  # fmt: skip
    assert pattern(bamba) == "S S F S"


def test_pure_mamba2_has_only_state():
    mamba2 = {
        "model_type": "mamba2", "num_hidden_layers": 2, "hidden_size": 128, "num_heads": 8, "head_dim": 32,
        "n_groups": 1, "state_size": 32, "conv_kernel": 4, "expand": 2, "torch_dtype": "bfloat16",
    }  # fmt: skip
    assert pattern(mamba2) == "S S"
    assert state(mamba2)["ssm"] == (2, 8, 32 * 32)


def test_jamba_is_mamba1_with_attention_at_a_period():
    jamba = {
        **ATTENTION, "model_type": "jamba", "num_hidden_layers": 6, "attn_layer_period": 4,
        "attn_layer_offset": 2, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
    }  # fmt: skip
    assert pattern(jamba) == "S S F S S S"
    assert state(jamba) == {"conv.x": (2, 128, 3), "ssm": (2, 128, 16)}


def test_mamba1_alone_says_its_channels():
    mamba = {
        "model_type": "falcon_mamba", "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96,
        "state_size": 16, "conv_kernel": 4, "torch_dtype": "float16",
    }  # fmt: skip
    assert state(mamba) == {"conv.x": (2, 96, 3), "ssm": (2, 96, 16)}


GATED = {
    **ATTENTION, "model_type": "qwen3_next", "num_hidden_layers": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip


def test_qwen3_next_is_attention_in_every_fourth_layer():
    assert pattern(GATED) == "S S S F S S S F"
    assert pattern({**GATED, "full_attention_interval": 2}) == "S F S F S F S F"
    words = ["linear_attention", "full_attention"] * 4
    assert pattern({**GATED, "layer_types": words}) == "S F S F S F S F"


def test_a_gated_delta_net_keeps_the_last_q_k_v_and_a_matrix_per_head():
    assert state(GATED) == {
        "conv.q": (2, 2, 16 * 3),
        "conv.k": (2, 2, 16 * 3),
        "conv.v": (2, 4, 32 * 3),
        "ssm": (2, 4, 32 * 16),
    }
    newer = {**GATED, "model_type": "qwen3_5_text", "mamba_ssm_dtype": "float32"}
    assert state(newer)["ssm"][0] == 4


def test_kimi_numbers_its_layers_from_one_and_has_latents_between():
    kimi = {
        "model_type": "kimi_linear", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16",
        "linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 4,
                               "head_dim": 16,
                               "short_conv_kernel_size": 4},
    }  # fmt: skip
    assert pattern(kimi) == "S S S M"
    segment = (2, 4, 16 * 3)
    assert state(kimi) == {"conv.q": segment, "conv.k": segment, "conv.v": segment, "ssm": (4, 4, 16 * 16)}


def test_lightning_attention_keeps_a_matrix_per_head():
    minimax = {
        **ATTENTION, "model_type": "minimax_text_01", "num_hidden_layers": 4,
        "attn_type_list": [0, 0, 1, 0], "head_dim": 16,
    }  # fmt: skip
    assert pattern(minimax) == "S S F S"
    assert state(minimax) == {"ssm": (2, 4, 16 * 16)}
    bailing = {**ATTENTION, "model_type": "bailing_moe_linear", "num_hidden_layers": 4, "layer_group_size": 2}
    assert pattern(bailing) == "S F S F"


def test_a_short_convolution_keeps_its_last_inputs():
    lfm2 = {
        **ATTENTION, "model_type": "lfm2", "num_hidden_layers": 4, "conv_L_cache": 3, "conv_dim": 128,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    }  # fmt: skip
    assert pattern(lfm2) == "S S F S"
    assert state(lfm2) == {"conv": (2, 128, 2)}


def test_state_follows_the_type_the_model_is_computed_in_and_not_that_of_the_cache():
    assert read_model(GATED, "fp8").cache.layers[0] == read_model(GATED).cache.layers[0]
    assert read_model(GATED, "fp8").cache.layers[3].whole_bytes == KV // 2
    assert (
        read_model(GATED, "float32").cache.layers[0].whole_bytes
        == 2 * read_model(GATED).cache.layers[0].whole_bytes
    )
