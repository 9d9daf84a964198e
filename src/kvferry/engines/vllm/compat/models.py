"""The models that a worker has built. vLLM gives a connector no reference to them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.worker_base import WorkerBase

from kvferry.errors import ConfigError

SHARED_LAYERS = ("vllm.model_executor.layers.", "vllm.v1.", "vllm.attention.", "torch.")
"""Prefixes of Python modules that all models use. Classes of other modules belong to one model's own code."""


_FOUND = WeakSet[WorkerBase]()


@dataclass(frozen=True, slots=True)
class Models:
    """Target model and draft model that one worker has built.

    Attributes:
        target: model that answers requests.
        draft: draft model for speculative decoding. None without one that keeps layers of its own in the KV
            cache.
    """

    target: torch.nn.Module
    draft: torch.nn.Module | None


def built_models(vllm_config: VllmConfig) -> Models:
    """Return the models that the worker in this process has built (`worker_of`).

    Raises:
        ConfigError: there is no such worker in this process.
    """
    worker = worker_of(vllm_config)
    return Models(worker.get_model(), worker.get_draft_model() if keeps_draft_layers(vllm_config) else None)


def worker_of(vllm_config: VllmConfig) -> WorkerBase:
    """Return the worker in this process that belongs to the engine with this configuration.

    The first call must precede vLLM's warm-up.

    Raises:
        ConfigError: there is no such worker in this process.
    """
    # vLLM keeps the layers of the model in this dictionary, so it tells apart the engines of a process.
    context = vllm_config.compilation_config.static_forward_context
    for one in _candidates():
        if issubclass(type(one), WorkerBase) and one.compilation_config.static_forward_context is context:
            _FOUND.add(one)
            return one
    raise ConfigError(
        "the engine's model was not found in this process, so nothing can say what its KV cache holds; "
        "please report this with the version of vLLM"
    )


def _candidates() -> Iterator[Any]:
    """Yield the workers that were found before, then all objects in this process."""
    yield from list(_FOUND)
    # A list of a million objects takes 50 ms, so it is made only if it is needed.
    # On a GPU, the warm-up hides existing objects from it (`gc.freeze`).
    yield from gc.get_objects()


def keeps_draft_layers(vllm_config: VllmConfig) -> bool:
    """Return True if the engine uses a draft model that has layers of its own in the KV cache."""
    config = vllm_config.speculative_config
    return config is not None and bool(config.uses_draft_kv_cache())


def reads_ahead(vllm_config: VllmConfig) -> int:
    """Return how many of the following tokens the draft model reads to compute the KV of a token."""
    # 0 for draft models that read no later tokens, 1 for those that combine the target model's output with
    # the next token (EAGLE, MTP). Each further MTP module reads one more.
    return int(vllm_config.num_prefill_lookahead_tokens)


def draft_layer_names(vllm_config: VllmConfig) -> frozenset[str]:
    """Return the names of the layers that belong only to the draft model. Call this in a worker.

    Raises:
        ConfigError: the models are not in this process.
    """
    if not keeps_draft_layers(vllm_config):
        return frozenset()
    models = built_models(vllm_config)
    if models.draft is None:
        return frozenset()
    # A layer's name does not tell its model, and a KV cache group may contain layers of both.
    own = {id(part) for part in models.draft.modules()} - {id(part) for part in models.target.modules()}
    layers = vllm_config.compilation_config.static_forward_context
    return frozenset(name for name, layer in layers.items() if id(layer) in own)


def pools_every_token(vllm_config: VllmConfig) -> str:
    """Return the pooling methods for which a model must compute every prompt token, as a text."""
    model = vllm_config.model_config
    pooler = getattr(model, "pooler_config", None)
    # vLLM turns its own prefix cache off for such a model, but still asks connectors for cached KV.
    if pooler is None or model.is_prefix_caching_supported:
        return ""
    return ", ".join(str(each) for each in (pooler.seq_pooling_type, pooler.tok_pooling_type) if each)
