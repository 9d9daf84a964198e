"""Properties of model families that a ``config.json`` may leave out.

The defaults are those of the configuration classes in transformers. Published files may omit such keys. The
kind of recurrence is that of vLLM's implementation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from types import MappingProxyType
from typing import Any

from kvferry.common.errors import ConfigError
from kvferry.tools.models.config import ModelConfig


class Mixer(Enum):
    """The kind of attention or recurrence of a layer. It decides what the layer caches."""

    FULL = auto()
    SLIDING = auto()
    CHUNKED = auto()
    MAMBA1 = auto()
    MAMBA2 = auto()
    GATED_DELTA = auto()
    KIMI_DELTA = auto()
    LIGHTNING = auto()
    SHORT_CONV = auto()


RECURRENT = frozenset(
    {Mixer.MAMBA1, Mixer.MAMBA2, Mixer.GATED_DELTA, Mixer.KIMI_DELTA, Mixer.LIGHTNING, Mixer.SHORT_CONV}
)


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """Properties of a model family that its ``config.json`` does not state but that determine its KV cache.

    Attributes:
        everywhere: True if every layer is recurrent.
        beside_attention: True if every layer also has attention; used only with `everywhere`.
        window_offset: tokens to add to ``sliding_window`` to get the attention window.
        attentions: number of attention caches per layer.
        expanded: True if layers cache K and V per head although the model computes both from a latent.
        ssm_dtype: element type of the recurrent state; None for the type in which the model computes.
    """

    recurrent: Mixer | None = None
    everywhere: bool = False
    beside_attention: bool = False
    window_offset: int = 0
    attentions: int = 1
    expanded: bool = False
    ssm_dtype: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


_GEMMA3 = ModelFamily(
    defaults={
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    }
)
_LLAMA4 = ModelFamily(defaults={"no_rope_layer_interval": 4, "attention_chunk_size": 8192, "head_dim": 128})
_GATED_DELTA = ModelFamily(
    Mixer.GATED_DELTA, defaults={"full_attention_interval": 4, "linear_conv_kernel_dim": 4}
)
_MAMBA2 = ModelFamily(Mixer.MAMBA2)
_KIMI = ModelFamily(Mixer.KIMI_DELTA, ssm_dtype="float32")

_GEMMA3N = ModelFamily(
    defaults={
        "num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
        "sliding_window": 512, "sliding_window_pattern": 5, "num_kv_shared_layers": 15,
    }
)  # fmt: skip
_GEMMA4 = ModelFamily(
    defaults={
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512,
        "sliding_window": 512, "sliding_window_pattern": 6,
    }
)  # fmt: skip
_COHERE2 = ModelFamily(window_offset=1, defaults={"sliding_window_pattern": 4, "sliding_window": 4096})
_SPARSE = {
    "use_sparse_attention": True, "sparse_index_dim": 128, "sparse_attention_freq": [0] * 3 + [1] * 57,
}  # fmt: skip
_MINIMAX_M3 = ModelFamily(
    defaults={
        "num_hidden_layers": 60, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
        "sparse_attention_config": _SPARSE,
    }
)  # fmt: skip
_MLA = ModelFamily(defaults={"kv_lora_rank": 512, "qk_rope_head_dim": 64})
_INDEXED = ModelFamily(defaults={"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128})
_OLMO3 = ModelFamily(defaults={"sliding_window_pattern": 4, "sliding_window": 4096})
_LIGHTNING = ModelFamily(Mixer.LIGHTNING)
_SHORT_CONV = ModelFamily(Mixer.SHORT_CONV)
_WINDOWED = ModelFamily(defaults={"sliding_window": 4096})
_STEP = ModelFamily(defaults={"head_dim": 128})

_SPECIAL: Mapping[str, ModelFamily] = {
    "gemma2": ModelFamily(defaults={"sliding_window_pattern": 2, "sliding_window": 4096, "head_dim": 256}),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma3n_text": _GEMMA3N,
    "gemma4_text": _GEMMA4,
    "gpt_oss": ModelFamily(defaults={"sliding_window_pattern": 2, "sliding_window": 128, "head_dim": 64}),
    "cohere2": _COHERE2,
    "cohere2_moe": _COHERE2,
    "olmo3": _OLMO3,
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
    "mamba": ModelFamily(Mixer.MAMBA1, everywhere=True),
    "falcon_mamba": ModelFamily(Mixer.MAMBA1, everywhere=True),
    "mamba2": ModelFamily(Mixer.MAMBA2, everywhere=True),
    "jamba": ModelFamily(Mixer.MAMBA1, defaults={"attn_layer_period": 8, "attn_layer_offset": 4}),
    "falcon_h1": ModelFamily(Mixer.MAMBA2, everywhere=True, beside_attention=True),
    "bamba": _MAMBA2,
    "granitemoehybrid": _MAMBA2,
    "zamba2": _MAMBA2,
    "nemotron_h": ModelFamily(Mixer.MAMBA2, ssm_dtype="float32"),
    "qwen3_next": _GATED_DELTA,
    "qwen3_5_text": _GATED_DELTA,
    "qwen3_5_moe_text": _GATED_DELTA,
    "olmo_hybrid": ModelFamily(Mixer.GATED_DELTA),
    "kimi_linear": _KIMI,
    "minimax_m3": _MINIMAX_M3,
    "minimax_m3_text": _MINIMAX_M3,
    "minimax_m3_vl": _MINIMAX_M3,
    "minimax_text_01": _LIGHTNING,
    "minimax_m1": _LIGHTNING,
    "minimax": _LIGHTNING,
    "bailing_moe_linear": _LIGHTNING,
    "lfm2": _SHORT_CONV,
    "lfm2_moe": _SHORT_CONV,
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "kimi_k2": _MLA,
    "deepseek_v32": _INDEXED,
    "glm_moe_dsa": _INDEXED,
    "longcat_flash": ModelFamily(attentions=2, defaults={"kv_lora_rank": 512, "qk_rope_head_dim": 64}),
    "minicpm3": ModelFamily(expanded=True),
    "step3_text": ModelFamily(defaults={"num_key_value_heads": 1}),
    "step3p5": _STEP,
    "step3p7": _STEP,
    "mistral": _WINDOWED,
}

# Families without recurrent layers and without defaults.
_ATTENTION_ONLY = (
    "afmoe", "apertus", "arcee", "axk1", "baichuan", "bailing_moe", "bailing_moe_v2", "bloom", "chatglm",
    "cohere", "deepseek", "deepseek_v4", "dots1", "ernie4_5", "ernie4_5_moe", "exaone", "exaone4",
    "exaone_moe", "falcon", "gemma", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_bigcode",
    "gpt_neox", "gptj", "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm2", "internlm3", "laguna", "llama",
    "mimo", "mimo_v2", "mimo_v2_flash", "minicpm", "minimax_m2", "ministral", "ministral3", "mixtral",
    "nemotron", "nemotron-nas", "olmo", "olmo2", "olmoe", "opt", "phi", "phi3", "phimoe", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_vl_moe_text", "qwen3_vl_text", "seed_oss", "smollm3", "solar",
    "solar_open", "stablelm", "starcoder2", "transformer",
)  # fmt: skip

# Model families that kvferry can read, by model type.
FAMILIES: Mapping[str, ModelFamily] = MappingProxyType(
    {**dict.fromkeys(_ATTENTION_ONLY, ModelFamily()), **_SPECIAL}
)


_ENCODERS = frozenset((
    "albert", "bert", "camembert", "clip", "colmodernvbert", "convbert", "deberta", "deberta_v2",
    "distilbert", "electra", "ernie", "eurobert", "gte", "jina_embeddings_v3", "luke", "megatron_bert",
    "modernbert", "modernvbert", "mpnet", "new", "nomic_bert", "openai_privacy_filter", "rembert", "roberta",
    "roformer", "siglip", "siglip2", "siglip_text_model", "siglip_vision_model", "splade", "vit",
    "xlm-roberta", "xlm-roberta-xl",
))  # fmt: skip
_ENCODER_DECODERS = frozenset((
    "bart", "blenderbot", "byt5", "cohere_asr", "led", "longt5", "m2m_100", "marian", "mbart", "mllama",
    "moonshine", "mt5", "nllb-moe", "pegasus", "speech_to_text", "switch_transformers", "t5", "t5gemma",
    "t5gemma2", "umt5", "whisper",
))  # fmt: skip


def check_decoder(config: ModelConfig) -> None:
    """Raise a ConfigError if the model is an encoder, without a KV cache, or an encoder-decoder."""
    name = config.model_type or "unknown"
    if config.get("is_encoder_decoder") is True or name in _ENCODER_DECODERS:
        raise ConfigError(
            f"model type {name} is an encoder-decoder: its decoder also keeps keys and values of the "
            "encoder's output (cross-attention), which no prompt token names, so nothing is handed over"
        )
    both_ways = config.get("use_bidirectional_attention") is True or config.get("is_causal") is False
    if name in _ENCODERS or both_ways:
        reason = (
            "reads its input in both directions" if both_ways else "is an encoder: it reads its input at once"
        )
        raise ConfigError(
            f"model type {name} {reason} and keeps no KV cache, so there is nothing to hand over"
        )


_KEY = "per_layer_config"
_KNOWN = frozenset({"head_dim", "num_key_value_heads", "num_attention_heads"})


def layer_overrides(config: ModelConfig) -> Mapping[int, Mapping[str, Any]]:
    """Return the settings of individual layers from ``per_layer_config``, by layer index.

    Raises:
        ConfigError: a layer does not exist, or a setting is unknown and may affect the cache.
    """
    value = config.get(_KEY)
    if value is None:
        return {}
    config.mark_read(_KEY)
    if not isinstance(value, Mapping):
        raise ConfigError(f"config.json: {_KEY} is {value!r}, an object is expected")
    if unnumbered := [key for key in value if not key.isdecimal() or int(key) >= config.layers]:
        raise ConfigError(
            f"config.json: {_KEY} has {', '.join(sorted(unnumbered))} where the number of a layer, below "
            f"{config.layers}, is expected; its KV cache cannot be planned"
        )
    overrides = {int(key): settings for key, settings in value.items()}
    for layer, settings in overrides.items():
        if not isinstance(settings, Mapping):
            raise ConfigError(f"config.json: {_KEY}.{layer} is {settings!r}, an object is expected")
    unknown = {name for settings in overrides.values() for name in settings} - _KNOWN
    # The number of query heads affects the cache only if KV heads or head width are derived from it.
    if not (config.get("num_key_value_heads", "num_attention_groups") and config.get("head_dim")):
        unknown |= {"num_attention_heads"} & {name for settings in overrides.values() for name in settings}
    if unknown:
        raise ConfigError(
            f"config.json: {_KEY} has {', '.join(sorted(unknown))}, which may decide what is kept per token, "
            "and kvferry does not know how; its KV cache cannot be planned yet"
        )
    return overrides


def check_layer_overrides(config: ModelConfig, layers: Sequence[Sequence[Mixer]]) -> None:
    """Raise a ConfigError if a setting in ``per_layer_config`` is invalid, or is for a recurrent layer."""
    for number, settings in layer_overrides(config).items():
        if settings and not RECURRENT.isdisjoint(layers[number]):
            named = ", ".join(sorted(settings))
            raise ConfigError(
                f"config.json: {_KEY} has {named} of layer {number}, which is recurrent; its KV cache cannot "
                "be planned yet"
            )
