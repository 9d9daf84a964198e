"""The model that a worker has built; vLLM hands a connector no reference to it."""

from __future__ import annotations

import gc

import torch
from vllm.config import VllmConfig

from kvferry.engines.vllm.compat.drafts import draft_layer_names
from kvferry.errors import ConfigError

SHARED_LAYERS = ("vllm.model_executor.layers.", "vllm.v1.", "vllm.attention.", "torch.")
"""Modules that all models are made of; what others keep is a model's own."""


def built_model(vllm_config: VllmConfig) -> torch.nn.Module:
    """The model that this worker has built, not the draft model; vLLM hands a connector no reference to it.

    It is in no other module, and has the layers of this engine that are not a draft's. Call it before vLLM
    warms up: it then hides all objects from the garbage collector.

    Raises:
        ConfigError: there is none.
    """
    drafts = draft_layer_names(vllm_config)
    context = vllm_config.compilation_config.static_forward_context
    layers = {id(layer) for name, layer in context.items() if name not in drafts}
    modules = [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)]
    inner = {id(child) for one in modules for child in one.children()}
    counts = [
        (sum(id(part) in layers for part in one.modules()), one) for one in modules if id(one) not in inner
    ]
    most, model = max(counts, key=lambda each: each[0], default=(0, None))
    if model is None or not most:
        raise ConfigError(
            "the engine's model was not found in this process, so nothing can say what its KV cache holds; "
            "please report this with the version of vLLM"
        )
    return model


def vocabulary_size(vllm_config: VllmConfig) -> int:
    """How many token ids the engine can sample."""
    return int(vllm_config.model_config.get_vocab_size())


def pools_every_token(vllm_config: VllmConfig) -> str:
    """The pooling of a model whose answers need every token of a prompt computed; empty for other models.

    vLLM caches no prefixes of such a model, but still asks a connector for them.
    """
    model = vllm_config.model_config
    pooler = getattr(model, "pooler_config", None)
    if pooler is None or model.is_prefix_caching_supported:
        return ""
    return ", ".join(str(each) for each in (pooler.seq_pooling_type, pooler.tok_pooling_type) if each)
