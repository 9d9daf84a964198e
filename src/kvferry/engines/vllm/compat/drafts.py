"""Draft models of speculative decoding: their layers, and how far they look ahead."""

from __future__ import annotations

import gc

from vllm.config import VllmConfig


def keeps_draft_layers(vllm_config: VllmConfig) -> bool:
    """Whether the engine speculates with a model that keeps layers of its own in the cache."""
    config = vllm_config.speculative_config
    return config is not None and bool(config.uses_draft_kv_cache())


def draft_layer_names(vllm_config: VllmConfig) -> frozenset[str]:
    """Names of the layers that the engine's draft model keeps in the cache; call it in a worker.

    Only vLLM's own drafter knows them: a name or a place in a list of layers says nothing certain, and KV
    cache groups mix them with the model's own. No hook hands the drafter over, so it is found among the
    objects of the process, once per start.
    """
    if not keeps_draft_layers(vllm_config):
        return frozenset()
    context = vllm_config.compilation_config.static_forward_context
    for one in gc.get_objects():
        if not type(one).__module__.startswith("vllm.v1."):
            continue
        held = getattr(one, "__dict__", {})
        names = held.get("_draft_attn_layer_names", held.get("draft_attn_layer_names"))
        theirs = getattr(held.get("vllm_config"), "compilation_config", None)
        if names is not None and getattr(theirs, "static_forward_context", None) is context:
            return frozenset(names)
    return frozenset()


def reads_ahead(vllm_config: VllmConfig) -> int:
    """How many tokens beyond a position a draft model looks at when it computes that position.

    0: none, or there is no such draft. 1: it combines what the model computed with the next token (EAGLE,
    MTP). More: several MTP modules, each one token further.
    """
    return int(vllm_config.num_prefill_lookahead_tokens)
