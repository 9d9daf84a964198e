"""What attention layers keep, by family, with sizes computed by hand."""

from __future__ import annotations

from collections import Counter

import pytest

from kvferry.common.errors import ConfigError
from kvferry.geometry import GroupKind
from kvferry.tools.models import read_model

FULL, SLIDING, CHUNKED, MLA = GroupKind.FULL, GroupKind.SLIDING, GroupKind.CHUNKED, GroupKind.MLA


def dense(model_type="llama", layers=4, **more):
    """4 KV heads of 16 elements of 2 bytes: 256 bytes per token and layer."""
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "torch_dtype": "bfloat16",
        **more,
    }


def kept(config, dtype="auto"):
    """(kind, attention span, bytes of a token or snapshot) of every layer."""
    return [
        (layer.kind, layer.attention_span, layer.whole_bytes)
        for layer in read_model(config, dtype).cache.layers
    ]


def windows(config):
    """Window of every layer, 0 for none."""
    layers = read_model(config).cache.layers
    assert all((layer.kind is SLIDING) == (layer.attention_span > 0) for layer in layers)
    return [layer.attention_span for layer in layers]


def test_grouped_queries_keep_k_and_v_of_their_kv_heads():
    assert kept(dense()) == [(FULL, 0, 2 * 4 * 16 * 2)] * 4


def test_model_without_kv_heads_stores_every_head():
    assert kept(dense(num_key_value_heads=None, layers=1)) == [(FULL, 0, 2 * 8 * 16 * 2)]


@pytest.mark.parametrize(
    "name", ["num_kv_heads", "n_head_kv", "multi_query_group_num", "num_attention_groups"]
)
def test_kv_heads_are_read_under_the_names_that_families_give_them(name):
    config = dense(num_key_value_heads=None, layers=1, **{name: 2})
    assert kept(config) == [(FULL, 0, 2 * 2 * 16 * 2)]


@pytest.mark.parametrize("name", ["window_length", "num_sink_tokens", "sparsify"])
def test_unread_attention_settings_of_a_block_configuration_are_refused(name):
    blocks = [{"attention": {name: 4}}, {"attention": {"no_op": True}}]
    config = dense("nemotron-nas", 2, block_configs=blocks)
    with pytest.raises(ConfigError, match=f"block_configs has {name} for layer 0"):
        read_model(config)


def test_multi_query_keeps_one_head():
    assert kept(dense("falcon", 1, multi_query=True, num_key_value_heads=None)) == [(FULL, 0, 2 * 1 * 16 * 2)]
    assert kept(dense("llama", 1, num_key_value_heads=1)) == [(FULL, 0, 2 * 1 * 16 * 2)]


def test_a_width_that_is_given_is_not_derived():
    assert kept(dense("qwen3", 1, head_dim=128)) == [(FULL, 0, 2 * 4 * 128 * 2)]


def test_old_names_of_keys_are_read():
    config = {"model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 64, "torch_dtype": "float16"}
    assert kept(config) == [(FULL, 0, 2 * 4 * 16 * 2)] * 2


def test_a_list_of_words_says_which_layers_have_a_window():
    words = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    assert windows(dense("gpt_oss", layer_types=words, sliding_window=128)) == [128, 0, 128, 0]


def test_gemma3_has_a_window_but_in_every_sixth_layer():
    assert windows(dense("gemma3_text", 7, sliding_window=1024)) == [1024] * 5 + [0, 1024]
    assert windows(dense("gemma3_text", 4, sliding_window=512, sliding_window_pattern=2)) == [512, 0, 512, 0]


def test_gemma3_says_little_where_it_is_as_its_family_is():
    small = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 6,
             "hidden_size": 2560, "sliding_window": 1024}, "torch_dtype": "bfloat16"}  # fmt: skip
    assert kept(small) == [(SLIDING, 1024, 2 * 4 * 256 * 2)] * 5 + [(FULL, 0, 2 * 4 * 256 * 2)]


def test_gpt_oss_and_gemma2_alternate_from_a_window_on():
    for family in ("gpt_oss", "gemma2"):
        assert windows(dense(family, sliding_window=64)) == [64, 0, 64, 0]


def test_cohere2_sees_one_token_more_than_it_says():
    assert windows(dense("cohere2", sliding_window=64)) == [65, 65, 65, 0]


def test_exaone_spells_its_pattern():
    assert windows(dense("exaone4", 5, sliding_window=64, sliding_window_pattern="LLG")) == [
        64,
        64,
        0,
        64,
        64,
    ]


def test_qwen_has_a_window_from_a_layer_on_and_only_if_it_says_so():
    asked = {"sliding_window": 64, "max_window_layers": 2}
    assert windows(dense("qwen2", **asked, use_sliding_window=True)) == [0, 0, 64, 64]
    assert windows(dense("qwen2", **asked, use_sliding_window=False)) == [0] * 4


def test_mistral_has_its_window_everywhere():
    assert windows(dense("mistral", sliding_window=4096)) == [4096] * 4
    assert windows(dense("mistral", sliding_window=None)) == [0] * 4
    assert windows(dense("mistral", sliding_window=0)) == [0] * 4


def test_llama4_sees_chunks_where_it_has_rotary_positions():
    every = dense("llama4_text", 5, attention_chunk_size=8192, head_dim=16)
    size = 2 * 4 * 16 * 2
    assert kept(every) == [(CHUNKED, 8192, size)] * 3 + [(FULL, 0, size), (CHUNKED, 8192, size)]
    listed = dense("llama4_text", 3, attention_chunk_size=64, no_rope_layers=[0, 1, 1], head_dim=16)
    assert [layer.kind for layer in read_model(listed).cache.layers] == [FULL, CHUNKED, CHUNKED]


def test_k_and_v_may_differ_in_width_and_layers_with_a_window_in_heads():
    config = dense(
        "mimo_v2_flash", 2, head_dim=192, v_head_dim=128, hybrid_layer_pattern=[0, 1], sliding_window=128,
        swa_num_key_value_heads=8, swa_head_dim=192, swa_v_head_dim=128, attention_chunk_size=128,
    )  # fmt: skip
    assert kept(config) == [(FULL, 0, 4 * (192 + 128) * 2), (SLIDING, 128, 8 * (192 + 128) * 2)]


def test_gemma4_has_fewer_and_wider_heads_without_a_window():
    words = ["sliding_attention", "full_attention"]
    config = dense(
        "gemma4_text", 2, layer_types=words, sliding_window=1024, head_dim=256, num_key_value_heads=8,
        global_head_dim=512, num_global_key_value_heads=2, attention_k_eq_v=True,
    )  # fmt: skip
    assert kept(config) == [(SLIDING, 1024, 2 * 8 * 256 * 2), (FULL, 0, 2 * 2 * 512 * 2)]
    config["attention_k_eq_v"] = False
    assert kept(config) == [(SLIDING, 1024, 2 * 8 * 256 * 2), (FULL, 0, 2 * 8 * 512 * 2)]


def test_settings_per_layer_go_by_the_number_of_the_layer_padded_or_not():
    words = ["sliding_attention"] * 11 + ["full_attention"]
    for full in ("11", "0011"):
        config = dense(
            "gemma4_text", 12, layer_types=words, sliding_window=1024, head_dim=256, num_key_value_heads=8,
            per_layer_config={"05": {"head_dim": 128}, full: {"head_dim": 512, "num_key_value_heads": 2}},
        )  # fmt: skip
        windows = [(SLIDING, 1024, 2 * 8 * (128 if layer == 5 else 256) * 2) for layer in range(11)]
        assert kept(config) == [*windows, (FULL, 0, 2 * 2 * 512 * 2)]


@pytest.mark.parametrize(
    ("own", "says"),
    [
        ({"all": {"head_dim": 512}}, "has all where the number of a layer, below 2, is"),
        ({"1": {}, "02": {"head_dim": 512}}, "has 02 where the number of a layer, below 2, is"),
        ([{"head_dim": 512}], r"is \[{'head_dim': 512}\], an object is"),
        ({"1": {"hidden_size": 4}}, "has hidden_size, which may decide"),
    ],
)
@pytest.mark.parametrize(
    "more", [{"model_type": "gemma4_text"}, {"model_type": "llama"}, {"kv_lora_rank": 512}]
)
def test_settings_per_layer_that_cannot_be_read_are_refused(own, says, more):
    config = {**dense("deepseek_v3", 2, qk_rope_head_dim=64), **more, "per_layer_config": own}
    with pytest.raises(ConfigError, match=f"per_layer_config {says}"):
        read_model(config)


def test_query_heads_per_layer_decide_nothing_where_the_kv_heads_and_their_width_are_said():
    own = {"1": {"num_attention_heads": 96}}
    plain = dense("step3p5", 2, head_dim=128, num_key_value_heads=8)
    assert kept({**plain, "per_layer_config": own}) == kept(plain)
    for name in ("num_key_value_heads", "head_dim"):
        unsaid = {key: value for key, value in plain.items() if key != name} | {"model_type": "llama"}
        with pytest.raises(ConfigError, match="per_layer_config has num_attention_heads, which may decide"):
            read_model({**unsaid, "per_layer_config": own})


def test_settings_of_a_recurrent_layer_are_refused():
    config = dense("lfm2", 2, layer_types=["conv", "full_attention"], conv_L_cache=3)
    half = {"1": {"num_key_value_heads": 2}}
    assert [size for _, _, size in kept({**config, "per_layer_config": half})][1] * 2 == kept(config)[1][2]
    with pytest.raises(ConfigError, match="head_dim of layer 0, which is recurrent"):
        read_model({**config, "per_layer_config": {"0": {"head_dim": 4}}})


def test_layers_that_share_an_earlier_cache_keep_nothing():
    reading = read_model(dense(num_kv_shared_layers=3))
    assert reading.kept == (1, 0, 0, 0)
    assert len(reading.cache.layers) == 1


def latents(**more):
    return dense("deepseek_v3", 2, kv_lora_rank=512, qk_rope_head_dim=64, **more)


def test_mla_keeps_one_latent_that_no_rank_shares():
    (layer, _) = read_model(latents()).cache.layers
    assert (layer.kind, layer.whole_bytes) == (MLA, (512 + 64) * 2)
    assert [(field.name, field.heads) for field in layer.fields] == [("latent", 0)]


def test_sparse_mla_keeps_an_indexer_beside_it():
    sizes = [
        (layer.kind, layer.whole_bytes) for layer in read_model(latents(index_head_dim=128)).cache.layers
    ]
    assert sizes == [(MLA, 1152), (MLA, 128 + 4)] * 2


@pytest.mark.parametrize(
    ("dtype", "size"), [("auto", 1152), ("fp8", 576), ("fp8_ds_mla", 512 + 4 * 4 + 64 * 2), ("float32", 2304)]
)
def test_the_element_type_of_a_latent(dtype, size):
    assert kept(latents(), dtype)[0] == (MLA, 0, size)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("auto", 256),
        ("bfloat16", 256),
        ("float32", 512),
        ("fp8", 128),
        ("fp8_e5m2", 128),
        ("fp8_per_token_head", 2 * 4 * (16 + 4)),
    ],
)
def test_the_element_type_of_k_and_v(dtype, size):
    assert kept(dense(layers=1), dtype) == [(FULL, 0, size)]


def test_a_checkpoint_in_float32_is_served_in_bfloat16_and_that_is_said():
    reading = read_model(dense(layers=1, torch_dtype="float32"))
    assert reading.cache.layers[0].whole_bytes == 256
    assert reading.notes == (
        "the checkpoint is float32, which vLLM serves in bfloat16 unless told otherwise",
    )


def test_the_language_model_of_one_that_sees():
    outer = {"model_type": "llava", "vision_config": {"num_hidden_layers": 9}, "text_config": dense()}
    assert kept(outer) == kept(dense())
    deeper = {"thinker_config": {"text_config": dense(torch_dtype=None)}, "torch_dtype": "float16"}
    assert kept(deeper) == kept(dense())


def test_draft_layers_are_kept_when_asked_for():
    config = latents(num_nextn_predict_layers=1)
    assert len(read_model(config).cache.layers) == 2
    with_draft = read_model(config, draft=True)
    assert with_draft.kept == (1, 1, 1)
    assert Counter(layer.kind for layer in with_draft.cache.layers) == {MLA: 3}
    with pytest.raises(ConfigError, match="names no multi-token prediction layers"):
        read_model(dense(), draft=True)


def test_an_unknown_family_is_read_as_ordinary_attention_and_that_is_said():
    reading = read_model(dense("brand_new"))
    assert [layer.whole_bytes for layer in reading.cache.layers] == [256] * 4
    assert reading.notes == ("model type brand_new is not known: read as ordinary attention by its keys",)
    assert read_model(dense()).notes == ()
