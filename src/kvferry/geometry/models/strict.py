"""Checks for keys of a ``config.json`` that no rule has read.

A key whose name suggests that it affects the cache causes an error, because the computed sizes might be
wrong. Keys that are known to affect something else are ignored. All other keys are listed in a note.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvferry.errors import ConfigError
from kvferry.geometry.models.config import ModelConfig

_CLEARLY_ELSEWHERE = re.compile(
    r"^(hc|mlp|moe|lm_head|layer_?norm|layerdrop|norm|activation|rope|layer_rope|tokenizer|vision|audio|image|video)_?"
)
# Keys whose names match `_DECIDES` although they do not affect the cache.
_HARMLESS = frozenset((
    # Computation of queries, and heads that are not cached.
    "qk_nope_head_dim", "qk_head_dim", "q_lora_rank", "o_lora_rank", "o_groups", "query_pre_attn_scalar",
    "num_attention_heads_per_layer", "swa_num_attention_heads", "share_q_dim", "v_channels", "q_lora_norm",
    "index_topk", "index_n_heads", "index_share_for_mtp_iteration", "indexer_rope_interleave",
    "num_hash_layers", "num_sliding_attention_heads",
    # Computation of attention from cached values.
    "attention_bias", "attention_dropout", "attention_multiplier", "attention_out_bias", "attention_in_bias",
    "attn_logit_softcapping", "attn_output_gate", "attention_output_gate", "attn_temperature_tuning",
    "attn_scale", "use_attn_output_gate", "attn_pdrop", "attn_dropout", "attn_implementation",
    "_attn_implementation", "_attn_implementation_internal", "attention_qkv_bias",
    "add_swa_attention_sink_bias", "add_full_attention_sink_bias", "attention_value_scale",
    "attn_res_block_size", "attention_logit_softcapping", "attention_probs_dropout_prob", "floor_scale",
    "use_attention_bias", "attention_sinks", "gated_attention", "use_head_wise_attn_gate", "swa_use_sink",
    "attn_bias", "attention_softmax_in_fp32", "use_qk_norm", "scale_attention_softmax_in_fp32",
    "self_attn_bias", "scale_attn_by_inverse_layer_idx", "scale_attn_weights", "reorder_and_upcast_attn",
    "attention_layers_bias", "full_attn_alpha_factor", "full_attn_beta_factor", "linear_attn_alpha_factor",
    "linear_attn_beta_factor", "mla_use_nope", "mla_use_output_gate", "mla_scale_q_lora", "mla_scale_kv_lora",
    "use_mla", "mla_qkv_concat", "attention_rope", "rope_head_dim", "swa_rope_theta", "local_rope_theta",
    "rope_local_base_freq", "global_rope_theta", "sliding_window_rope_theta", "swa_rope_parameters",
    "compress_rope_theta", "attention_method", "layer_norm_epsilon", "layer_norm_eps", "qkv_bias",
    "linear_bias", "head_bias", "attention_gate", "gated_attn", "mm_prefix_clamp_sliding_window",
    "attention_chunked", "add_qkv_bias", "interleaved_qkv", "parallel_attn", "attention_hidden_size",
    "use_shared_attention_adapter", "use_qkv_bias", "multi_query_attention", "qkv_proj_bias",
    "attention_layernorm",
    # Computation of a recurrence.
    "chunk_size", "mamba_chunk_size", "mamba_proj_bias", "mamba_conv_bias", "mamba_dt_rank",
    "mamba_hidden_act", "mamba_rms_norm", "mamba_norm_before_gate", "mamba_use_mlp", "use_conv_bias",
    "use_mamba_kernels", "conv_bias", "ssm_multipliers", "ssm_in_multiplier", "ssm_out_multiplier",
    "key_multiplier", "attention_in_multiplier", "attention_out_multiplier", "mlp_multipliers", "mamba_bias",
    "state_norm", "use_mem_rank", "use_mem_eff_path", "num_mem_blocks", "linear_attention_bias",
    "mamba_inner_layernorms", "time_step_rank", "group_norm_size", "linear_silu", "linear_scale",
    "linear_rope", "use_linear_silu", "layernorm_full_attention_alpha", "layernorm_full_attention_beta",
    "layernorm_linear_attention_alpha", "layernorm_linear_attention_beta", "num_blocks",
    "use_associative_scan", "use_short_conv_bias", "chunk_size_feed_forward", "use_mambapy",
    "use_falcon_mambapy", "linear_a_log_max", "linear_a_log_min", "linear_allow_neg_eigval",
    "linear_dt_init_floor", "linear_dt_max", "linear_dt_min", "linear_use_gate", "conv_use_xavier_init",
    "latent_moe_use_norm",
    # Generation and training.
    "use_cache", "cache_implementation", "pad_to_multiple_of", "add_cross_attention",
    "cross_attention_hidden_size", "num_logits_to_keep", "is_decoder", "no_repeat_ngram_size", "pruned_heads",
    "output_attentions", "output_hidden_states", "tie_encoder_decoder", "encoder_no_repeat_ngram_size",
    "num_return_sequences", "layer_types_full", "vision_soft_tokens_per_image", "head_bias_init",
    "tied_layers", "has_lm_head_bias", "lm_head_bias", "scale_embedding", "block_name",
    "num_layers_per_stack", "use_lm_head_norm", "embd_layer_norm", "layer_name", "rm_head",
    # Draft layers, which are planned only with --mtp.
    "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "mtp_layers_block_type",
    "mtp_hybrid_override_pattern", "mtp_use_dedicated_embeddings", "num_mtp_layers", "mtp_layer_types",
    "mtp_sliding_windows", "mtp_transformer_layers", "use_mtp", "num_mtp_heads",
    # Other names of keys that rules read.
    "kda_use_full_rank_gate", "num_attention_heads", "n_head", "n_heads",
))  # fmt: skip

_DECIDES = re.compile(
    r"kv|key_value|quant|head|window|swa|slid|layer_?types?|layers?_block|^layer|latent|lora_rank|ssm|mamba|rwkv|retention"
    r"|conv_|conv$|state|compress|^index|indexer|kpool|sink|cache|attn|attention|recurr|delta|kda|gdn|hybrid|chunk"
    r"|sparse_att|linear_|pattern|interval|share_kv|kv_shar|cross_|hidden_layers|n_layers?$|num_layers|block_config"
    r"|multi_query|ngram|memory|v_dim|k_dim"
)
_ELSEWHERE = re.compile(
    r"vocab|rope|rotary|expert|moe|router|topk|top_k|token|embed|embd|norm|eps$|dropout|pdrop|bias|act(ivation)?_?(fn|function)?$"
    r"|hidden_act|initializer|init_|_std$|intermediate|mlp|ffn|n_inner|ff_|logit|dtype|version|architectures"
    r"|_name_or_path|auto_map|max_position|max_seq|seq_len|pretraining_tp|tie_|loss|_coef|scoring|n_group|topk_group"
    r"|multiplier|residual|softcap|label|return_dict|torchscript|prefix|problem_type|task|beam|penalty|temperature"
    r"|typical_p|early_stopping|do_sample|num_return|min_length|max_length|bad_words|suppress|diversity|hc_|swiglu"
    r"|hidden_size_per_layer|laurel|altup|image|video|audio|vision|language_model_only|time_step|expand|gate|scale"
    r"|scaling|ep_size|theta|original_max|special|transformers|is_causal|alibi|parallel|hidden_size|remove_invalid"
    r"|zero_|tf_legacy|finetuning|model_type|shared_intermediate|first_k_dense|decoder_sparse|mlp_only|altup|probability"
)


def check_unread(config: ModelConfig) -> list[str]:
    """Check the keys of ``config.json`` that were not read, and return a note for the user about them.

    Raises:
        ConfigError: the name of an unread key suggests that it affects the KV cache.
    """
    unread = [
        name for name, value in config.values.items() if value is not None and name not in config.read_keys
    ]
    unread = [name for name in unread if name not in _HARMLESS and not _CLEARLY_ELSEWHERE.match(name)]
    deciding = [name for name in unread if _DECIDES.search(name)]
    if deciding:
        raise ConfigError(
            f"config.json of model type {config.model_type or 'unknown'}: {_list(deciding)} may decide what "
            "is kept per token, and kvferry does not know how; its KV cache cannot be planned yet"
        )
    unknown = [name for name in unread if not _ELSEWHERE.search(name)]
    return [f"config.json: {_list(unknown)} not known and not used"] if unknown else []


def check_nested(config: ModelConfig, name: str, harmless: Iterable[str]) -> None:
    """Check that every key of the nested object `name` was read or is known to be harmless.

    Raises:
        ConfigError: a key was not.
    """
    unknown = [key for key in config.values if key not in config.read_keys and key not in harmless]
    if unknown:
        raise ConfigError(
            f"config.json: {name}.{unknown[0]} is not known, and may decide what is kept; its KV cache "
            "cannot be planned yet"
        )


def _list(names: list[str]) -> str:
    return ", ".join(names)
