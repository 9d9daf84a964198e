"""Write a checkpoint with random weights, just large enough that a step on a CPU takes a noticeable time.

The weights must be in files: an engine with dummy weights (`load_format=dummy`) stores no chunks, because it
has no digest of the weights to name them by.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 4096
MODEL: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
"""Configuration of a Qwen3 with 27 million parameters and 8 KiB of KV cache per token in bfloat16."""


def write_checkpoint(folder: Path, longest: int, changes: dict[str, Any] | None = None) -> Path:
    """Write the checkpoint without a tokenizer, and return its folder.

    Args:
        folder: folder to create.
        longest: length of the longest request, in tokens.
        changes: values that replace those of `MODEL`; None for none.
    """
    import torch  # noqa: PLC0415 - slow, and few benchmarks need it
    import transformers  # noqa: PLC0415

    transformers.utils.logging.disable_progress_bar()
    config = transformers.Qwen3Config(
        **{**MODEL, **(changes or {})},
        vocab_size=VOCABULARY,
        max_position_embeddings=longest,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def token_bytes(changes: dict[str, Any] | None = None) -> int:
    """Return the number of bytes of KV cache per token for a checkpoint that `write_checkpoint` wrote.

    Args:
        changes: values that replace those of `MODEL`; None for none.
    """
    model = {**MODEL, **(changes or {})}
    return 2 * 2 * int(model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_dim"])
