"""Settings of speculative decoding with a draft model: its layers in the cache, and its lookahead."""

from __future__ import annotations

from vllm.config import VllmConfig


def keeps_draft_layers(vllm_config: VllmConfig) -> bool:
    """Return True if the engine uses a draft model that has layers of its own in the KV cache."""
    config = vllm_config.speculative_config
    return config is not None and bool(config.uses_draft_kv_cache())


def reads_ahead(vllm_config: VllmConfig) -> int:
    """Return how many of the following tokens the draft model reads to compute the KV of a token.

    The number is 0 without a draft model, and for draft models that read no later tokens. It is 1 for draft
    models that combine the target model's output with the next token (EAGLE, MTP). It is greater for draft
    models with several MTP modules, because each module reads one more token than the module before it.
    """
    return int(vllm_config.num_prefill_lookahead_tokens)
