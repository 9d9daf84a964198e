"""What families of models leave unsaid in their ``config.json``.

Defaults are those of the configuration classes in transformers; they matter where a published file leaves a
key out. What a family's recurrent layers are is vLLM's choice of implementation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from types import MappingProxyType
from typing import Any


class Mixer(Enum):
    """How a layer looks at other tokens, which decides what it keeps of them."""

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
class Family:
    """What the reader of a ``config.json`` must know beforehand.

    Attributes:
        recurrent: what layers that are not attention are, if there are such.
        everywhere: every layer has the recurrence, alone or, with `beside_attention`, next to attention.
        beside_attention: as said.
        window_offset: tokens that a window has more than ``sliding_window`` says.
        ssm_dtype: element type of the recurrent state; None: as computed.
        defaults: of keys that may be left out.
    """

    recurrent: Mixer | None = None
    everywhere: bool = False
    beside_attention: bool = False
    window_offset: int = 0
    ssm_dtype: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


_GEMMA3 = Family(
    defaults={
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    }
)
_LLAMA4 = Family(defaults={"no_rope_layer_interval": 4, "attention_chunk_size": 8192, "head_dim": 128})
_GATED_DELTA = Family(Mixer.GATED_DELTA, defaults={"full_attention_interval": 4, "linear_conv_kernel_dim": 4})
_MAMBA2 = Family(Mixer.MAMBA2)
_KIMI = Family(Mixer.KIMI_DELTA, ssm_dtype="float32")

_SPECIAL: Mapping[str, Family] = {
    "gemma2": Family(defaults={"sliding_window_pattern": 2, "sliding_window": 4096, "head_dim": 256}),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gpt_oss": Family(defaults={"sliding_window_pattern": 2, "sliding_window": 128, "head_dim": 64}),
    "cohere2": Family(window_offset=1, defaults={"sliding_window_pattern": 4, "sliding_window": 4096}),
    "olmo3": Family(defaults={"sliding_window_pattern": 4, "sliding_window": 4096}),
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
    "mamba": Family(Mixer.MAMBA1, everywhere=True),
    "falcon_mamba": Family(Mixer.MAMBA1, everywhere=True),
    "mamba2": Family(Mixer.MAMBA2, everywhere=True),
    "jamba": Family(Mixer.MAMBA1, defaults={"attn_layer_period": 8, "attn_layer_offset": 4}),
    "falcon_h1": Family(Mixer.MAMBA2, everywhere=True, beside_attention=True),
    "bamba": _MAMBA2,
    "granitemoehybrid": _MAMBA2,
    "zamba2": _MAMBA2,
    "nemotron_h": Family(Mixer.MAMBA2, ssm_dtype="float32"),
    "qwen3_next": _GATED_DELTA,
    "qwen3_5_text": _GATED_DELTA,
    "qwen3_5_moe_text": _GATED_DELTA,
    "olmo_hybrid": Family(Mixer.GATED_DELTA),
    "kimi_linear": _KIMI,
    "minimax_text_01": Family(Mixer.LIGHTNING),
    "minimax_m1": Family(Mixer.LIGHTNING),
    "minimax": Family(Mixer.LIGHTNING),
    "bailing_moe_linear": Family(Mixer.LIGHTNING),
    "lfm2": Family(Mixer.SHORT_CONV),
    "lfm2_moe": Family(Mixer.SHORT_CONV),
}

_ATTENTION_ONLY = (
    "apertus", "arcee", "baichuan", "cohere", "deepseek", "deepseek_v2", "deepseek_v3", "deepseek_v32",
    "ernie4_5", "ernie4_5_moe", "exaone", "exaone4", "falcon", "gemma", "gemma4_text", "glm", "glm4",
    "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt2", "gpt_bigcode", "gpt_neox", "granite", "granitemoe",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "internlm2", "internlm3", "kimi_k2", "llama", "mimo",
    "mimo_v2_flash", "minicpm", "minicpm3", "minimax_m2", "ministral", "mistral", "mixtral", "nemotron",
    "olmo", "olmo2", "olmoe", "opt", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "qwen3_vl_moe_text", "qwen3_vl_text", "seed_oss", "smollm3", "solar", "stablelm", "starcoder2",
)  # fmt: skip

FAMILIES: Mapping[str, Family] = MappingProxyType({**dict.fromkeys(_ATTENTION_ONLY, Family()), **_SPECIAL})
"""Families whose ``config.json`` is understood, by model type."""
