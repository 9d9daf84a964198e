"""The architectures of the tiny checkpoints, and the engine options to run them on a CPU.

The dimensions are as small as possible, but keep everything that matters for the KV cache: several KV heads,
grouped queries, windows shorter than a prompt, MLA latents of the real width, and recurrent layers together
with an attention layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from kvferry.common.errors import ConfigError
from kvferry.tools.serving.tiny.tokenizer import VOCABULARY

_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
_LATENT = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
_NO_PREFIX_CACHE = {"enable_prefix_caching": False}


@dataclass(frozen=True, slots=True)
class Family:
    """A model architecture and the settings of its tiny checkpoint.

    Attributes:
        groups: description of the KV cache groups that an engine creates for this architecture.
        config: name of the configuration class in transformers.
        settings: arguments of this class, in addition to those that all families share.
        engine_reads: fields to add to the checkpoint's config.json, because the engine needs them and
            transformers does not write them.
        scale: standard deviation of the random weight matrices, except for the embedding.
        embedding_scale: standard deviation of the embedding's random weights.
        engine: keyword arguments of `vllm.LLM` that the family needs, in addition to ``dtype``.
    """

    name: str
    groups: str
    config: str
    settings: Mapping[str, Any]
    engine_reads: Mapping[str, Any] = field(default_factory=dict)
    scale: float = 0.08
    # If it is too large, the output depends only on the last token and not on the KV cache. If it is too
    # small, the last token has no effect. In both cases the generated tokens repeat.
    embedding_scale: float = 0.08
    dtype: str = "float32"
    engine: Mapping[str, Any] = field(default_factory=dict)

    def engine_options(self) -> dict[str, Any]:
        return {"dtype": self.dtype, **self.engine}


_ALL = (
    Family(
        name="qwen3",
        groups="full attention",
        config="Qwen3Config",
        settings={**_ATTENTION, "tie_word_embeddings": True},
        scale=0.12,
        embedding_scale=0.02,
    ),
    Family(name="llama", groups="full attention", config="LlamaConfig", settings=_ATTENTION),
    Family(
        name="gemma3",
        groups="5 sliding window, 1 full attention",
        config="Gemma3TextConfig",
        settings={
            **_ATTENTION,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "sliding_window": 64,
            "query_pre_attn_scalar": 32,
        },
        scale=0.15,
        embedding_scale=0.01,
    ),
    Family(
        name="gemma4",
        groups="3 sliding window, 1 full attention, each read by two layers",
        config="Gemma4TextConfig",
        settings={
            **_ATTENTION,
            "num_hidden_layers": 8,
            "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
            "num_kv_shared_layers": 4,
            "sliding_window": 64,
            "num_global_key_value_heads": 1,
            "global_head_dim": 64,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": VOCABULARY,
        },
        scale=0.15,
        embedding_scale=0.01,
    ),
    Family(
        name="gptoss",
        groups="sliding window, full attention",
        config="GptOssConfig",
        settings={
            **_ATTENTION,
            "head_dim": 64,
            "intermediate_size": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 64,
        },
    ),
    Family(
        name="llama4",
        groups="3 chunked local attention, 1 full attention",
        config="Llama4TextConfig",
        settings={
            **_ATTENTION,
            "intermediate_size_mlp": 256,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 384,
            # vLLM applies temperature tuning only if prompts may have more than 32,768 tokens.
            "max_position_embeddings": 65_536,
        },
    ),
    Family(
        name="dsv2",
        groups="MLA",
        config="DeepseekV2Config",
        settings={
            **_LATENT,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "q_lora_rank": None,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "first_k_dense_replace": 1,
            "topk_method": "greedy",
        },
        scale=0.05,
        embedding_scale=1.0,
        engine=_NO_PREFIX_CACHE,
    ),
    Family(
        name="dsv3",
        groups="MLA",
        config="DeepseekV3Config",
        # Use 16 heads. With 4 heads, the decode and prefill results of vLLM's CPU kernel differ several times
        # more.
        settings={
            **_LATENT,
            "num_hidden_layers": 3,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "first_k_dense_replace": 3,
        },
        scale=0.05,
        embedding_scale=2.0,
        engine=_NO_PREFIX_CACHE,
    ),
    Family(
        name="qwen3next",
        groups="3 gated delta net, 1 full attention",
        config="Qwen3NextConfig",
        settings={
            **_ATTENTION,
            "head_dim": 64,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            # Its kernels for a CPU have no float32, so it computes in bfloat16.
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "mlp_only_layers": [],
        },
        dtype="bfloat16",
    ),
    Family(
        name="nemotronh",
        groups="Mamba2, 1 full attention",
        config="NemotronHConfig",
        settings={
            **_ATTENTION,
            "num_hidden_layers": 6,
            "layers_block_type": ["mamba", "mlp", "mamba", "full_attention", "mamba", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "n_groups": 2,
            "ssm_state_size": 32,
        },
        engine_reads={"hybrid_override_pattern": "M-M*M-"},
        engine=_NO_PREFIX_CACHE,
    ),
    Family(
        name="falconh1",
        groups="Mamba2, full attention",
        config="FalconH1Config",
        settings={
            **_ATTENTION,
            "num_hidden_layers": 3,
            "mamba_d_ssm": 256,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_n_groups": 1,
            "mamba_d_state": 32,
        },
        engine=_NO_PREFIX_CACHE,
    ),
    Family(
        name="mamba2",
        groups="Mamba2",
        config="Mamba2Config",
        settings={"num_hidden_layers": 3, "num_heads": 8, "head_dim": 32, "n_groups": 1, "state_size": 32},
        engine=_NO_PREFIX_CACHE,
    ),
    Family(
        name="lfm2",
        groups="3 short convolution, 1 full attention",
        config="Lfm2Config",
        settings={
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
        },
        embedding_scale=0.02,
        engine_reads={"conv_dim": 128, "block_dim": 128, "block_ff_dim": 256},
    ),
)

FAMILIES: Mapping[str, Family] = MappingProxyType({each.name: each for each in _ALL})


def family(name: str) -> Family:
    """Return the model family of this name. Raise ConfigError if it is unknown."""
    if name not in FAMILIES:
        raise ConfigError(f"no tiny checkpoint is called {name!r}; there are: {', '.join(FAMILIES)}")
    return FAMILIES[name]
