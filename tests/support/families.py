"""Configurations of families of models, as their own classes write them, for what vLLM builds of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

ARCHITECTURES: Mapping[str, str] = {
    "afmoe": "AfmoeForCausalLM", "apertus": "ApertusForCausalLM", "axk1": "AXK1ForCausalLM",
    "bloom": "BloomForCausalLM", "cohere": "CohereForCausalLM", "cohere2": "Cohere2ForCausalLM",
    "cohere2_moe": "Cohere2MoeForCausalLM", "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM", "deepseek_v32": "DeepseekV32ForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM", "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM", "exaone4": "Exaone4ForCausalLM",
    "exaone_moe": "ExaoneMoeForCausalLM", "falcon": "FalconForCausalLM", "falcon_h1": "FalconH1ForCausalLM",
    "falcon_mamba": "FalconMambaForCausalLM", "gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM", "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "glm4": "Glm4ForCausalLM", "glm4_moe": "Glm4MoeForCausalLM", "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM", "gpt2": "GPT2LMHeadModel", "gptj": "GPTJForCausalLM",
    "gpt_oss": "GptOssForCausalLM", "granite": "GraniteForCausalLM", "granite_swa": "GraniteSWAForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM", "granitemoe_swa": "GraniteMoeSWAForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM", "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "hy_v3": "HYV3ForCausalLM", "hyperclovax": "HyperCLOVAXForCausalLM", "jamba": "JambaForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM", "kimi_linear": "KimiLinearForCausalLM", "laguna": "LagunaForCausalLM",
    "lfm2": "Lfm2ForCausalLM", "lfm2_moe": "Lfm2MoeForCausalLM", "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM", "longcat_flash": "LongcatFlashForCausalLM",
    "mamba": "MambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM", "mimo_v2_flash": "MiMoV2FlashForCausalLM",
    "minicpm3": "MiniCPM3ForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM", "minimax_m3_text": "MiniMaxM3SparseForCausalLM",
    "ministral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM", "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM", "nemotron": "NemotronForCausalLM", "nemotron_h": "NemotronHForCausalLM",
    "olmo2": "Olmo2ForCausalLM", "olmo3": "Olmo3ForCausalLM", "olmo_hybrid": "OlmoHybridForCausalLM",
    "olmoe": "OlmoeForCausalLM", "opt": "OPTForCausalLM", "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM", "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM", "seed_oss": "SeedOssForCausalLM", "smollm3": "SmolLM3ForCausalLM",
    "stablelm": "StableLmForCausalLM", "starcoder2": "Starcoder2ForCausalLM", "step3p5": "Step3p5ForCausalLM",
    "zamba2": "Zamba2ForCausalLM",
    "arcee": "ArceeForCausalLM", "cwm": "CwmForCausalLM", "diffusion_gemma_text": "Gemma4ForCausalLM",
    "flex_olmo": "FlexOlmoForCausalLM", "gemma4_unified_text": "Gemma4ForCausalLM", "glm": "GlmForCausalLM",
    "gpt_bigcode": "GPTBigCodeForCausalLM", "gpt_neox": "GPTNeoXForCausalLM",
    "hrm_text": "HrmTextForCausalLM", "jais2": "Jais2ForCausalLM",
    "muse_glimmer_text": "MuseGlimmerForCausalLM", "olmo": "OlmoForCausalLM",
    "phi": "PhiForCausalLM", "phimoe": "PhiMoEForCausalLM", "qwen2_5_omni_text": "Qwen2ForCausalLM",
    "vaultgemma": "VaultGemmaForCausalLM",
}  # fmt: skip
"""vLLM's class for each family, by model type; what is not here could not be built on a CPU."""

_MORE: Mapping[str, Mapping[str, Any]] = {
    # Keys that published files have and the class does not write, or sizes that fit into memory.
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "deepseek_v32": {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128},
    "deepseek_v4": {
        "vocab_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 64, "hidden_size": 1024,
        "head_dim": 512,
        "compress_ratios": [0, 4, 128, 0], "sliding_window": 128, "index_head_dim": 128, "index_topk": 512,
        "index_n_heads": 64, "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_lora_rank": 1024, "o_groups": 8,
        "num_key_value_heads": 1, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": 256, "hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20,
        "num_hash_layers": 3,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 4096, "rope_theta": 10000,
        "compress_rope_theta": 160000, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
        "routed_scaling_factor": 1.5, "norm_topk_prob": True, "swiglu_limit": 10.0, "expert_dtype": "fp4",
        "tie_word_embeddings": False, "initializer_range": 0.02,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 16, "original_max_position_embeddings": 65536,
            "type": "yarn",
        },
    },
    "apertus": {"hidden_size": 512, "num_hidden_layers": 2, "intermediate_size": 512,
    "num_attention_heads": 8},
    "gemma3n_text": {
        "hidden_size": 256, "intermediate_size": 256, "vocab_size": 512, "vocab_size_per_layer_input": 512,
        "hidden_size_per_layer_input": 32, "laurel_rank": 8,
    },
    "deepseek_v2": {"intermediate_size": 10944, "moe_intermediate_size": 1408},
    "kimi_linear": {"qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": 1536, "mla_use_nope": True},
    "glm4_moe": {"head_dim": 128},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "hy_v3": {"first_k_dense_replace": 1, "qk_norm": True, "head_dim": 128, "expert_hidden_dim": 1536},
    "lfm2": {"block_dim": 2560, "block_ff_dim": 12288, "conv_dim": 2560, "conv_dim_out": 2560},
    "longcat_flash": {"zero_expert_type": "identity", "mla_scale_q_lora": True, "mla_scale_kv_lora": True},
    "minimax_m2": {"rotary_dim": 64, "scoring_func": "sigmoid", "use_routing_bias": True},
    "qwen3_vl_text": {"tie_word_embeddings": False},
    "qwen3_vl_moe_text": {"tie_word_embeddings": False, "norm_topk_prob": True},
    "mimo_v2_flash": {
        "layer_types": None, "hybrid_layer_pattern": [0, 1, 1, 0], "num_hidden_layers": 4,
        "swa_num_attention_heads": 64,
        "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128, "sliding_window_size": 128,
        "sliding_window": 128, "layernorm_epsilon": 1e-6, "num_key_value_heads": 4, "head_dim": 192,
        "v_head_dim": 128,
    },
    "nemotron": {"num_key_value_heads": 8},
}  # fmt: skip


def default_config(model_type: str) -> dict[str, Any]:
    """Every key of a family's configuration, as its class has them without arguments."""
    from transformers import CONFIG_MAPPING
    from vllm.transformers_utils.config import _CONFIG_REGISTRY
    from vllm.transformers_utils.configs.minimax_m3 import MiniMaxM3TextConfig

    own = {"minimax_m3_text": MiniMaxM3TextConfig}
    made = own[model_type] if model_type in own else _registered(model_type, _CONFIG_REGISTRY, CONFIG_MAPPING)
    found = json.loads(made(**_MORE.get(model_type, {})).to_json_string(use_diff=False))
    return {**found, **_MORE.get(model_type, {}), **_fixed(model_type)}


def _registered(model_type: str, *registries: Any) -> Any:
    return next(registry[model_type] for registry in registries if model_type in registry)


def _fixed(model_type: str) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": [ARCHITECTURES[model_type]], "dtype": "bfloat16"}
