"""The architectures of the models that recall pairs, as small as engines on a CPU can run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
_FOLDER = Path(__file__).with_name("checkpoints")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A model that recalls pairs.

    Attributes:
        name: name on the command line.
        config: name of the configuration class in transformers.
        settings: arguments of the configuration class, in addition to those that all models share.
        engine_reads: fields to add to config.json, because the engine needs them and transformers does not
            write them.
        reach: greatest number of pairs between the key that is asked for and the end of the prompt. The
            sliding window, the convolution or the recurrent state must carry the key so far.
        looks_back: True if the first layer is attention, which must learn to look at the token before.
        carries: True if a recurrent state must learn to carry the key that is asked for. Training then starts
            with a reach of 0, and the attention of the answer counts as much as that of all other tokens.
        tells_key: True if training asks the first layer to tell the key of each number, and the key that is
            asked for.
        decays: logarithms of the decay that the first and the last head of a recurrent state start with, the
            others evenly between them; None for the architecture's own.
        is_tied: False if the engine reads embedding and output matrix apart. Training ties them all the same.
        engine: arguments of vLLM's API server that the model needs on a CPU.
    """

    name: str
    config: str
    settings: Mapping[str, Any]
    engine_reads: Mapping[str, Any] = field(default_factory=dict)
    reach: int
    looks_back: bool = False
    carries: bool = False
    tells_key: bool = False
    decays: tuple[float, float] | None = None
    is_tied: bool = True
    engine: Sequence[str] = ()

    @property
    def folder(self) -> Path:
        """Folder of the checkpoint and its questions."""
        return _FOLDER / self.name


_ALL = (
    Trained(
        name="gemma3",
        config="Gemma3TextConfig",
        settings={
            **_ATTENTION,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 64,
            "query_pre_attn_scalar": 32,
        },
        reach=28,
        looks_back=True,
    ),
    Trained(
        name="lfm2",
        config="Lfm2Config",
        settings={
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "layer_types": ["conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
        },
        engine_reads={"conv_dim": 64, "block_dim": 64, "block_ff_dim": 128},
        # The convolution sees three tokens.
        reach=0,
    ),
    Trained(
        name="qwen3next",
        config="Qwen3NextConfig",
        settings={
            **_ATTENTION,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "intermediate_size": 64,
            # vLLM wants a layer with experts. Each token goes to all of them, so rounding changes no choice.
            "mlp_only_layers": [0],
            "num_experts": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 32,
            "initializer_range": 0.05,
            "tie_word_embeddings": False,
        },
        reach=28,
        carries=True,
        # Some heads keep the key that is asked for, others see the last tokens alone.
        tells_key=True,
        decays=(-4.6, 2.7),
        is_tied=False,
        # The gated delta net has no float32 kernel on a CPU. A state can be kept at the end of a block, and a
        # prompt has 227 tokens: of blocks of 128 tokens vLLM makes 256 on some processors, of 64 192 at most.
        engine=("--dtype=bfloat16", "--block-size=64"),
    ),
    Trained(
        name="nemotronh",
        config="NemotronHConfig",
        settings={
            **_ATTENTION,
            "layers_block_type": ["mamba", "full_attention", "mlp"],
            "num_hidden_layers": 3,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "n_groups": 2,
            "ssm_state_size": 32,
            "initializer_range": 0.1,
            "tie_word_embeddings": False,
        },
        engine_reads={"hybrid_override_pattern": "M*-"},
        reach=28,
        carries=True,
        is_tied=False,
        # vLLM's Mamba2 kernel for CPUs keeps no snapshot inside a step, so a step is no longer than a block.
        engine=("--max-num-batched-tokens=64",),
    ),
)
MODELS: Mapping[str, Trained] = MappingProxyType({one.name: one for one in _ALL})
