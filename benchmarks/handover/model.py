"""Write the checkpoints of `benchmarks handover`: random weights, and steps of a few milliseconds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import VOCABULARY

_SHARED: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True)
class HandoverModel:
    """A model family whose requests are handed over.

    Attributes:
        name: name of the family, as users write it on the command line.
        title: kinds of the model's layers, for the report.
        config: name of the configuration class in transformers.
        settings: arguments of the configuration class.
        engine: keyword arguments of `vllm.LLM` that the family needs on a CPU.
        engine_reads: fields to add to the checkpoint's config.json, because the engine needs them.
    """

    name: str
    title: str
    config: str
    settings: Mapping[str, Any]
    engine: Mapping[str, Any] = field(default_factory=dict)
    engine_reads: Mapping[str, Any] = field(default_factory=dict)


MODELS = (
    HandoverModel(
        "qwen3", "8 full attention", "Qwen3Config", {"num_hidden_layers": 8}, {"dtype": "bfloat16"}
    ),
    HandoverModel(
        "gemma3",
        "10 sliding window, 2 full attention",
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 12,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
            "sliding_window": 512,
            "query_pre_attn_scalar": 64,
        },
        {"dtype": "bfloat16"},
    ),
    HandoverModel(
        "nemotronh",
        "4 Mamba2, 2 full attention",
        "NemotronHConfig",
        {
            "num_hidden_layers": 12,
            "layers_block_type": ["mamba", "mlp", "mamba", "mlp", "full_attention", "mlp"] * 2,
            "mamba_num_heads": 16,
            "mamba_head_dim": 32,
            "n_groups": 2,
            "ssm_state_size": 64,
            "tie_word_embeddings": False,
        },
        # With prefix caching, vLLM's CPU kernel for Mamba2 fails in a prefill step that crosses a block.
        {"dtype": "bfloat16", "enable_prefix_caching": False},
        {"hybrid_override_pattern": "M-M-*-M-M-*-"},
    ),
)
"""The model families that can be measured."""


def write_model(model: HandoverModel, folder: Path, longest: int) -> Path:
    """Write a family's checkpoint without a tokenizer, and return its folder.

    Args:
        model: family of the checkpoint.
        folder: folder to create.
        longest: length of the longest request, in tokens.
    """
    import torch  # noqa: PLC0415 - slow, and few benchmarks need it
    import transformers  # noqa: PLC0415

    transformers.utils.logging.disable_progress_bar()
    config = getattr(transformers, model.config)(
        **{**_SHARED, "max_position_embeddings": longest, **model.settings}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        built: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    built.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **model.engine_reads}))
    return folder
