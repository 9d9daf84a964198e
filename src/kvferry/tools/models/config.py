"""Lookup of the keys of a ``config.json``, which have different names in different model families.

A key that no rule has read might affect the KV cache, so `check_unread` refuses files with such keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.common.errors import ConfigError

_INNER = ("thinker_config", "text_config", "llm_config", "language_config")
DTYPES = ("dtype", "torch_dtype")
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# Keys whose value has one entry per layer: a list of words or a string of letters.
_PER_LAYER = ("layers_block_type", "layer_types", "hybrid_override_pattern")

# Bytes of one element of each floating-point type that a model may compute in.
FLOATS = {"float16": 2, "half": 2, "bfloat16": 2, "float32": 4, "float": 4}

# Types with one byte per element, and one float32 scale per token and head, for K and for V each.
SCALED = ("int8_per_token_head", "fp8_per_token_head")

# Packed type of an MLA latent: 512 fp8 elements, 4 float32 scales and 64 bfloat16 elements for positions.
# That is 656 bytes per token.
PACKED_LATENT = "fp8_ds_mla"

CACHE_DTYPES = ("auto", *FLOATS, "fp8", "fp8_e4m3", "fp8_e5m2", *SCALED, PACKED_LATENT)

# Keys and values of a quantization config that name the type of the KV cache.
_CACHE_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo")
_CACHE_TYPES = ("fp8", "nvfp4")

# Names of keys that do not affect the cache, that may, and that most probably do not (`check_unread`).
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


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The part of a ``config.json`` that describes the language model.

    Attributes:
        read_keys: every lookup adds the names of the keys that it has read.
    """

    values: Mapping[str, Any]
    defaults: Mapping[str, Any]
    read_keys: set[str] = field(default_factory=set, compare=False)

    @property
    def model_type(self) -> str:
        return str(self.get("model_type") or "")

    @property
    def layers(self) -> int:
        """Number of decoder layers, or of entries in a list with one per layer if no key gives it."""
        if self.get(*_LAYER_COUNTS) is None:
            for value in (self.get(name) for name in _PER_LAYER):
                if isinstance(value, list | str):
                    return len(value)
        return self.number(*_LAYER_COUNTS)

    def get(self, *names: str) -> Any:
        """Return the value of the first of alternative keys that has a value; None if none of them has one.

        All keys to which the file gives this value count as read.
        """
        for known in (self.values, self.defaults):
            value = next((known[name] for name in names if known.get(name) is not None), None)
            if value is not None:
                self.read_keys.update(name for name in names if self.values.get(name) == value)
                return value
            # A null in the file turns the setting off, so the family's default does not apply.
            if any(name in self.values for name in names):
                return None
        return None

    def mark_read(self, *names: str) -> None:
        """Count keys that do not matter for this model as read."""
        self.read_keys.update(names)

    def nested(self, name: str) -> ModelConfig:
        """Return the object under a key as a configuration; it is empty if the key is absent."""
        value = self.get(name)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise ConfigError(f"config.json: {name} is {value!r}, an object is expected")
        return ModelConfig(value, {})

    def number(self, *names: str) -> int:
        """Return the value of the first key that is present, or raise ConfigError unless it is above 0."""
        value = self.get(*names)
        if value is None:
            of_type = f" of model type {self.model_type}" if self.model_type else ""
            raise ConfigError(
                f"config.json{of_type} has no {' or '.join(names)}, which decides the size of its KV cache; "
                "add it to the file"
            )
        return checked_int(names[0], value, 1)

    def optional_int(self, *names: str) -> int | None:
        """Return what `number` returns; None if no key is present, or the value is 0 or false."""
        value = self.get(*names)
        return checked_int(names[0], value, 1) if value else None

    def listed(self, name: str, count: int) -> Sequence[Any] | None:
        """Return the value of a key with `count` entries, one per layer; None if the key is absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple | str) or len(value) != count:
            found = f"{len(value)} entries" if isinstance(value, list | tuple | str) else repr(value)
            raise ConfigError(
                f"config.json: {name} has {found} for {count} layers; one per layer is expected"
            )
        return value


def checked_int(name: str, value: Any, least: int) -> int:
    """Return the value of the key `name`, or raise ConfigError if it is no integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"config.json: {name} is {value!r}, a whole number of at least {least} is expected")
    return value


def language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the language model inside a multimodal model's configuration.

    Model type, element type and quantization of the outer one are added if the inner one has none.
    """
    outer = config
    known = ("model_type", *DTYPES, "quantization_config")
    while inner := next((outer[name] for name in _INNER if isinstance(outer.get(name), Mapping)), None):
        kept = {name: outer[name] for name in known if outer.get(name) is not None}
        outer = {**inner, **{name: value for name, value in kept.items() if inner.get(name) is None}}
    return outer


def check_unread(config: ModelConfig) -> list[str]:
    """Return a note about keys that were not read. Raise ConfigError if one may affect the KV cache."""
    unread = [
        name
        for name, value in config.values.items()
        if value is not None
        and name not in config.read_keys
        and name not in _HARMLESS
        and not _CLEARLY_ELSEWHERE.match(name)
    ]
    deciding = [name for name in unread if _DECIDES.search(name)]
    if deciding:
        raise ConfigError(
            f"config.json of model type {config.model_type or 'unknown'}: {', '.join(deciding)} may decide "
            "what is kept per token, and kvferry does not know how; its KV cache cannot be planned yet"
        )
    unknown = [name for name in unread if not _ELSEWHERE.search(name)]
    return [f"config.json: {', '.join(unknown)} not known and not used"] if unknown else []


def check_nested(config: ModelConfig, name: str, harmless: Iterable[str]) -> None:
    """Raise a ConfigError unless every key of the nested object `name` was read or is harmless."""
    unknown = [key for key in config.values if key not in config.read_keys and key not in harmless]
    if unknown:
        raise ConfigError(
            f"config.json: {name}.{unknown[0]} is not known, and may decide what is kept; its KV cache "
            "cannot be planned yet"
        )


def element_bytes(cache_dtype: str, model_dtype: str) -> int:
    """Return the bytes of one element of K, V or an MLA latent; ``auto`` stands for `model_dtype`."""
    if cache_dtype not in CACHE_DTYPES:
        raise ConfigError(
            f"element type {cache_dtype!r} is not known; choose one of {', '.join(CACHE_DTYPES)}"
        )
    return FLOATS[model_dtype] if cache_dtype == "auto" else FLOATS.get(cache_dtype, 1)


def float_name(name: str, value: Any) -> str:
    """Return the floating-point type in the value of the key `name`, without the prefix ``torch.``."""
    plain_name = str(value).removeprefix("torch.")
    if plain_name not in FLOATS:
        raise ConfigError(f"config.json: {name} is {value!r}, one of {', '.join(FLOATS)} is expected")
    return plain_name


def quantized_cache(config: ModelConfig, dtype: str) -> tuple[str, list[str]]:
    """Return (element type of the KV cache, notes for the user).

    With ``auto``, a checkpoint of ModelOpt or llm-compressor may name it.

    Raises:
        ConfigError: the checkpoint names a quantised type other than fp8.
    """
    # vLLM does the same: `resolve_kv_cache_dtype_string` for ModelOpt, and its attention layers for
    # llm-compressor.
    quantization = config.get("quantization_config")
    if dtype != "auto" or not isinstance(quantization, Mapping):
        return dtype, []
    key, found = _requested_type(quantization)
    if found is None:
        return dtype, []
    if found == "fp8":
        return "fp8", [f"the checkpoint keeps its KV cache in fp8 (quantization_config.{key})"]
    raise ConfigError(
        f"config.json: quantization_config.{key} asks for {found}, and kvferry plans only fp8; name the "
        "element type with --dtype"
    )


def _requested_type(quantization: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return (key that names the type of the KV cache, type). The type is None if vLLM takes the model's."""
    method = str(quantization.get("quant_method") or "").lower().replace("_", "-")
    if method == "compressed-tensors":  # of llm-compressor
        return _CACHE_KEYS[0], None if quantization.get(_CACHE_KEYS[0]) is None else "fp8"
    producer, inner = quantization.get("producer"), quantization.get("quantization")
    if not (
        method.startswith("modelopt")
        or (isinstance(producer, Mapping) and producer.get("name") == "modelopt")
        or (isinstance(inner, Mapping) and "modelopt_quant_config" in inner)
    ):
        return "", None
    places = (inner, quantization) if isinstance(inner, Mapping) else (quantization,)
    candidates = ((key, place[key]) for key in _CACHE_KEYS for place in places if place.get(key))
    key, scheme = next(candidates, ("", None))
    return key, _type_of(scheme)


def _type_of(scheme: Any) -> str | None:
    """Return the type that a ModelOpt checkpoint names; None if vLLM does not know it."""
    if isinstance(scheme, Mapping):
        if scheme.get("type") != "float":
            return None
        is_fp8 = scheme.get("num_bits") == 8 and scheme.get("dynamic") is False
        return "fp8" if is_fp8 else "nvfp4" if scheme.get("num_bits") == 4 else None
    return next((name for name in _CACHE_TYPES if name == str(scheme).lower()), None)
