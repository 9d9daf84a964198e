"""A key that no rule understands is named, and a misspelled key never changes the answer in silence."""

from __future__ import annotations

import random

import pytest

from kvferry.common.errors import ConfigError
from kvferry.tools.models import read_model
from kvferry.tools.plan.find import entries

DENSE = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize(
    "key",
    [
        "num_kv_groups_per_layer", "kv_head_schedule", "window_sizes", "local_attention_layers",
        "latent_rank",
        "state_dim_per_head", "compression_ratio_kv", "index_heads", "share_kv_every", "sink_tokens",
        "cache_layers",
        "mamba_d_state", "rwkv_head_size", "layer_pattern", "cross_layer_kv", "attention_type",
        "num_memory_heads",
        "linear_num_key_heads", "kv_lora_ranks", "swa_heads", "sliding_windows_per_head",
    ],
)  # fmt: skip
def test_a_key_that_may_decide_what_is_kept_is_an_error_that_names_it(key):
    with pytest.raises(ConfigError, match=key):
        read_model({**DENSE, key: 2})


def test_a_key_inside_an_object_is_an_error_that_names_it():
    kimi = dict(next(entry for entry in entries() if entry.name == "Kimi-K3").config)
    kimi["linear_attn_config"] = {**kimi["linear_attn_config"], "kv_share": 2}
    with pytest.raises(ConfigError, match=r"linear_attn_config\.kv_share"):
        read_model(kimi)


def test_keys_that_decide_something_else_are_no_error():
    others = {"attention_bias": True, "vocab_size": 5, "rope_theta": 1e6, "use_cache": True, "num_experts": 8}
    assert read_model({**DENSE, **others}).notes == ()


def test_a_key_that_is_not_known_is_named_in_a_note():
    assert read_model({**DENSE, "zorblax": 2}).notes == ("config.json: zorblax not known and not used",)


def test_a_key_that_is_null_says_nothing():
    assert read_model({**DENSE, "window_sizes": None}).notes == ()


@pytest.mark.parametrize("name", ["bert", "roberta", "xlm-roberta", "modernbert", "nomic_bert"])
def test_an_encoder_is_told_that_it_keeps_no_kv(name):
    with pytest.raises(ConfigError, match=f"{name} is an encoder: .* keeps no KV cache"):
        read_model({**DENSE, "model_type": name})


def test_a_decoder_that_reads_both_ways_keeps_no_kv():
    with pytest.raises(ConfigError, match="in both directions and keeps no KV cache"):
        read_model({**DENSE, "is_causal": False})


@pytest.mark.parametrize("name", ["t5", "whisper", "bart"])
def test_an_encoder_decoder_is_told_why_it_is_not_handed_over(name):
    with pytest.raises(ConfigError, match=f"{name} is an encoder-decoder: .*cross-attention"):
        read_model({**DENSE, "model_type": name, "is_encoder_decoder": True})


def test_a_checkpoint_that_quantizes_its_cache_decides_the_element_type():
    scheme = {"dynamic": False, "num_bits": 8, "type": "float"}
    quantized = {**DENSE, "quantization_config": {"quant_method": "modelopt", "kv_cache_scheme": scheme}}
    reading = read_model(quantized)
    assert reading.cache.layers[0].whole_bytes == read_model(DENSE, "fp8").cache.layers[0].whole_bytes
    assert reading.notes == (
        "the checkpoint keeps its KV cache in fp8 (quantization_config.kv_cache_scheme)",
    )
    assert read_model(quantized, "bfloat16").cache == read_model(DENSE).cache
    method = {"quant_method": "modelopt_fp4"}
    with pytest.raises(ConfigError, match=r"quantization_config\.kv_cache_quant_algo asks for nvfp4"):
        read_model({**DENSE, "quantization_config": {**method, "kv_cache_quant_algo": "NVFP4"}})


def test_blocks_without_attention_keep_nothing_and_others_say_their_heads():
    blocks = [
        {"attention": {"n_heads_in_group": 2, "no_op": False}},
        {"attention": {"n_heads_in_group": None, "no_op": True}},
        {"attention": {"n_heads_in_group": 4, "no_op": False}},
        {"attention": {"n_heads_in_group": 4, "no_op": False}},
    ]
    reading = read_model({**DENSE, "model_type": "nemotron-nas", "block_configs": blocks})
    assert reading.kept == (1, 0, 1, 1)
    assert [layer.whole_bytes for layer in reading.cache.layers] == [2 * 2 * 16 * 2, 2 * 16 * 2, 2 * 16 * 2]


def renamed(key: str, draw: random.Random) -> str:
    """The key with a slip of the pen, another style, or another name altogether."""
    at = draw.randrange(len(key))
    slips = (
        key[:at] + key[at + 1 :],
        key + draw.choice(["s", "_2", "_per_layer"]),
        draw.choice(["text_", "n_", "my_"]) + key,
        "".join(part.capitalize() for part in key.split("_")),
        "".join(draw.choice("bcfgjpqz") for _ in range(8)),
    )
    return draw.choice([slip for slip in slips if slip and slip != key])


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_a_key_that_is_spelled_otherwise_never_changes_the_answer_in_silence(entry):
    """The answer is the same, or an error, or a note names the key."""
    right, draw = read_model(entry.config), random.Random(entry.name)
    for key in [name for name, value in entry.config.items() if value is not None]:
        for _ in range(2):
            other = renamed(key, draw)
            config = {other if name == key else name: value for name, value in entry.config.items()}
            try:
                found = read_model(config)
            except ConfigError:
                continue
            told = any(other in note or note not in right.notes for note in found.notes)
            assert told or found.cache.layers == right.cache.layers, (key, other)
