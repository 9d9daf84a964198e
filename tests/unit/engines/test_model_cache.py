"""What we read from a config.json is what the installed vLLM allocates, by its own shapes and types."""

from __future__ import annotations

import importlib
from copy import deepcopy
from math import prod
from types import SimpleNamespace

import pytest

from kvferry.geometry import GroupKind
from kvferry.tools.models import read_model
from kvferry.tools.models.interior import page_interior
from kvferry.tools.plan.find import entries

pytestmark = pytest.mark.slow

torch = pytest.importorskip("torch")
pytest.importorskip("vllm.config")

STATE_MODELS = {
    "falcon_h1": ("vllm.model_executor.models.falcon_h1", "FalconH1ForCausalLM"),
    "granitemoehybrid": ("vllm.model_executor.models.granitemoehybrid", "GraniteMoeHybridForCausalLM"),
    "jamba": ("vllm.model_executor.models.jamba", "JambaForCausalLM"),
    "kimi_linear": ("vllm.models.kimi_k3.nvidia.model", "KimiLinearForCausalLM"),
    "lfm2": ("vllm.model_executor.models.lfm2", "Lfm2ForCausalLM"),
    "mamba": ("vllm.model_executor.models.mamba", "MambaForCausalLM"),
    "mamba2": ("vllm.model_executor.models.mamba2", "Mamba2ForCausalLM"),
    "nemotron_h": ("vllm.model_executor.models.nemotron_h", "NemotronHForCausalLM"),
    "qwen3_5_moe_text": ("vllm.model_executor.models.qwen3_next", "Qwen3NextForCausalLM"),
    "qwen3_5_text": ("vllm.model_executor.models.qwen3_next", "Qwen3NextForCausalLM"),
    "qwen3_next": ("vllm.model_executor.models.qwen3_next", "Qwen3NextForCausalLM"),
    "zamba2": ("vllm.model_executor.models.zamba2", "Zamba2ForCausalLM"),
}
SMALL = {
    "granite": {
        "model_type": "granitemoehybrid", "num_hidden_layers": 2, "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 32, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4,
        "mamba_expand": 2, "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4,
    },
    "lfm2": {
        "model_type": "lfm2", "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"],
        "conv_dim": 2048, "conv_L_cache": 3, "hidden_size": 2048, "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "mamba": {
        "model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 768, "intermediate_size": 1536,
        "state_size": 16, "conv_kernel": 4,
    },
    "mamba2": {
        "model_type": "mamba2", "num_hidden_layers": 2, "hidden_size": 768, "num_heads": 24, "head_dim": 64,
        "n_groups": 1, "state_size": 128, "conv_kernel": 4, "expand": 2,
    },
    "zamba2": {
        "model_type": "zamba2", "num_hidden_layers": 2, "layers_block_type": ["mamba", "hybrid"],
        "n_mamba_heads": 64, "mamba_headdim": 64, "mamba_ngroups": 2, "mamba_d_state": 64, "mamba_d_conv": 4,
        "mamba_expand": 2, "hidden_size": 2048, "num_attention_heads": 16, "attention_head_dim": 128,
    },
}  # fmt: skip
EVERY = {
    **{
        entry.name: {key: value for key, value in entry.config.items() if key != "quantization_config"}
        for entry in entries()
    },
    **SMALL,
}
DIFFERING = ("compress_ratios", "global_head_dim")
"""Keys of models whose layers differ, which one spec does not describe; test_model_built asks every layer."""
WITH_STATE = {name: config for name, config in EVERY.items() if config["model_type"] in STATE_MODELS}
WITH_ATTENTION = {
    name: config
    for name, config in EVERY.items()
    if "num_attention_heads" in config and not any(key in config for key in DIFFERING)
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def vllm_page_bytes(config: dict, tp: int) -> int:
    """Bytes of a snapshot on one rank, by vLLM's own shapes and element types."""
    from vllm.model_executor.models import config as rules
    from vllm.utils.torch_utils import get_dtype_size

    where, name = STATE_MODELS[config["model_type"]]
    model = getattr(importlib.import_module(where), name)
    hf = SimpleNamespace(**{"mamba_d_ssm": None, **config})
    cache = SimpleNamespace(
        mamba_cache_dtype="auto", mamba_ssm_cache_dtype="auto", use_replayssm=False, use_kda_recoverssm=False
    )
    if config["model_type"] == "nemotron_h":
        rules.NemotronHForCausalLMConfig.update_mamba_ssm_cache_dtype(cache_config=cache, hf_config=hf)
    if config["model_type"].startswith("qwen3_5"):
        cache.mamba_ssm_cache_dtype = config["mamba_ssm_dtype"]
    engine = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=tp),
        cache_config=cache,
        model_config=SimpleNamespace(
            dtype=DTYPES[config.get("dtype", "bfloat16")], hf_config=hf, hf_text_config=hf
        ),
        speculative_config=None,
        num_speculative_tokens=0,
    )
    shapes = model.get_mamba_state_shape_from_config(engine)
    dtypes = model.get_mamba_state_dtype_from_config(engine)
    return sum(prod(shape) * get_dtype_size(dtype) for shape, dtype in zip(shapes, dtypes, strict=True))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", WITH_STATE)
def test_a_snapshot_has_as_many_bytes_as_vllms(name, tp):
    config = WITH_STATE[name]
    (state,) = {layer for layer in read_model(config).cache.layers if layer.kind is GroupKind.STATE}
    assert page_interior(state, 1, 1, 0, tp).page_bytes == vllm_page_bytes(config, tp)


def vllm_token_bytes(config: dict, cache_dtype: str) -> int:
    """Bytes of a token in one layer without a window, by vLLM's own reading of the file and its spec."""
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, get_kv_quant_mode

    known = {"head_dim": None, "num_key_value_heads": None, "v_head_dim": None, **config}
    known = {name: value for name, value in known.items() if value is not None}
    hf = SimpleNamespace(**{"architectures": [""], **known})
    read = ModelArchConfigConvertorBase(hf, hf)
    dtype = torch.uint8 if cache_dtype != "auto" else DTYPES[config.get("dtype", "bfloat16")]
    common = {"block_size": 1, "dtype": dtype, "kv_quant_mode": get_kv_quant_mode(cache_dtype)}
    if "kv_lora_rank" in config:
        width = config["kv_lora_rank"] + config["qk_rope_head_dim"]
        packed = {"fp8_ds_mla": 656}.get(cache_dtype)
        return MLAAttentionSpec(
            num_kv_heads=1, head_size=width, state_content_bytes=packed, **common
        ).page_size_bytes
    spec = FullAttentionSpec(
        num_kv_heads=read.get_total_num_kv_heads(),
        head_size=config.get("head_dim") or config.get("attention_head_dim") or read.get_head_size(),
        head_size_v=config.get("v_head_dim"),
        **common,
    )
    return TritonAttentionBackend.customize_spec(spec).page_size_bytes


FITTING = [
    (name, cache_dtype)
    for name, config in WITH_ATTENTION.items()
    for cache_dtype in ("auto", "fp8", "fp8_ds_mla" if "kv_lora_rank" in config else "fp8_per_token_head")
]


@pytest.mark.parametrize(("name", "cache_dtype"), FITTING)
def test_a_token_has_as_many_bytes_as_vllms(name, cache_dtype):
    config = WITH_ATTENTION[name]
    layers = read_model(config, cache_dtype).cache.layers
    tokens = [layer for layer in layers if layer.kind is not GroupKind.STATE]
    # What has a window may have other heads, an indexer is a cache of its own.
    plain = [
        layer for layer in tokens if not layer.attention_span and layer.fields[0].name != "indexer"
    ] or tokens
    assert {layer.whole_bytes for layer in plain} == {vllm_token_bytes(config, cache_dtype)}


def seeing(heads: int, hidden: int, latent: int | None, rope: int) -> dict:
    """A file of DeepSeek-VL2, with the keys of its language model that a reader has to judge."""
    language = {
        "model_type": "deepseek_v2", "num_hidden_layers": 3, "hidden_size": hidden,
        "num_attention_heads": heads, "num_key_value_heads": heads, "kv_lora_rank": latent,
        "qk_nope_head_dim": 2 * rope, "qk_rope_head_dim": rope, "v_head_dim": 2 * rope, "q_lora_rank": None,
        "use_mla": latent is not None, "lm_head": True, "rm_head": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    return {"model_type": "deepseek_vl_v2", "torch_dtype": "bfloat16", "language_config": language}


@pytest.mark.parametrize(
    "config", [seeing(32, 2560, 512, 64), seeing(10, 1280, None, 0)], ids=["latents", "K and V"]
)
def test_deepseek_vl2_keeps_what_vllm_resolves(config):
    from vllm.transformers_utils.configs.deepseek_vl2 import DeepseekVLV2Config
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    theirs = DeepseekVLV2Config(**deepcopy(config))
    resolved = ModelArchConfigConvertorBase(theirs, theirs.text_config).convert()
    entry = (
        resolved.head_size
        if resolved.is_deepseek_mla
        else 2 * resolved.total_num_kv_heads * resolved.head_size
    )
    layers = read_model(config).cache.layers
    assert [layer.whole_bytes for layer in layers] == [2 * entry] * resolved.total_num_hidden_layers
    assert {layer.kind is GroupKind.MLA for layer in layers} == {resolved.is_deepseek_mla}
