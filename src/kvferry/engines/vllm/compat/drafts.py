"""Draft models of speculative decoding: whether they keep layers, and how far they look ahead."""

from __future__ import annotations

from vllm.config import VllmConfig


def keeps_draft_layers(vllm_config: VllmConfig) -> bool:
    """Whether the engine speculates with a model that keeps layers of its own in the cache."""
    config = vllm_config.speculative_config
    return config is not None and bool(config.uses_draft_kv_cache())


def reads_ahead(vllm_config: VllmConfig) -> int:
    """How many tokens beyond a position a draft model looks at when it computes that position.

    0: none, or there is no such draft. 1: it combines what the model computed with the next token (EAGLE,
    MTP). More: several MTP modules, each one token further.
    """
    return int(vllm_config.num_prefill_lookahead_tokens)
