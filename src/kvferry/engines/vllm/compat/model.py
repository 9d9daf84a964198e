"""vLLM's models: those that a worker has built, their layers and weights, and what they compute KV from.

vLLM gives a connector no reference to the models of a worker, so they are looked for among all objects.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
from vllm import _custom_ops, envs
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.transformers_utils.processor import cached_processor_from_config
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
from vllm.v1.executor import Executor
from vllm.v1.worker.worker_base import WorkerBase

from kvferry.common.errors import ConfigError
from kvferry.connector.content import Adapters

SHARED_LAYERS = ("vllm.model_executor.layers.", "vllm.v1.", "vllm.attention.", "torch.")
"""Prefixes of Python modules that all models use. Classes of other modules belong to one model's own code."""


_FOUND = WeakSet[WorkerBase]()
_LISTENERS = WeakSet[Adapters]()

_OF_WORKER = (
    "reload_weights", "reset_weights", "start_weight_update", "start_draft_weight_update", "update_weights",
    "finish_weight_update",
)  # fmt: skip
_OF_RUNNER = ("reload_weights",)
_OF_MODEL = ("load_weights",)
"""Methods of the worker, the model runner and the models. All of vLLM's ways to change weights end in one of
these, and trainers call them in a worker."""

_PATCHED = "_kvferry_patched"
_PROCESSOR_PARTS = ("image_processor", "video_processor", "feature_extractor", "audio_processor")


def patch_once(owner: type, name: str, function: Callable[..., Any]) -> None:
    """Put a function in place of a method of vLLM, which it gets before the method's own arguments.

    A process may have several engines, and each method is patched once.
    """
    inner = getattr(owner, name)
    if hasattr(inner, _PATCHED):
        return

    @wraps(inner)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        return function(inner, self, *arguments, **named)

    setattr(call, _PATCHED, True)
    setattr(owner, name, call)


@dataclass(frozen=True, slots=True)
class Models:
    """Models that one worker has built: the target, and a draft that has layers in the KV cache, if any."""

    target: torch.nn.Module
    draft: torch.nn.Module | None


def built_models(vllm_config: VllmConfig) -> Models:
    """Return the models that the worker in this process has built (`worker_of`)."""
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
    """Return the names of the layers that belong only to the draft model. Call this in a worker."""
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


def attention_layer(vllm_config: VllmConfig, name: str) -> Any:
    """Return the layer object that has this name in the engine's model."""
    return vllm_config.compilation_config.static_forward_context[name]


def conv_channels_first() -> bool:
    """Return True if vLLM stores convolution states as (channels, window), False for (window, channels)."""
    return bool(is_conv_state_dim_first())


def is_indexer(layer: Any) -> bool:
    """Return True if a layer's cache holds only the fp8 keys of a sparse indexer (DeepSeek V3.2, GLM-5)."""
    return layer.get_attn_backend().get_name() == "DEEPSEEK_V32_INDEXER" and layer.dtype is torch.uint8


def write_index_keys(
    layer: Any, keys: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, group: int
) -> None:
    """Quantise a sparse indexer's keys into the layer's cache, with the operation that vLLM uses on CUDA.

    Args:
        keys: keys to write, of shape (tokens, width). The width is a multiple of `group`.
        cache: cache of the layer, uint8 of shape (blocks, tokens, bytes).
        slots: position of each token in the cache, int64 of shape (tokens,).
        group: number of elements of a key that share a scale.

    Raises:
        RuntimeError: the layer's backend stores its keys in another order (shuffled).
        AttributeError: this build of vLLM lacks the operation.
    """
    if layer.uses_shuffled_layout:
        raise RuntimeError("its indexer's keys are shuffled")
    _custom_ops.indexer_k_quant_and_cache(keys.to(torch.bfloat16), cache, slots, group, "ue8m0")


def operators_layout() -> str | None:
    """Return the KV cache layout set with ``VLLM_KV_CACHE_LAYOUT``; None if not set."""
    return envs.VLLM_KV_CACHE_LAYOUT


def supported_layouts(vllm_config: VllmConfig) -> list[str]:
    """Return the names of the KV cache layouts that all attention backends of the model support."""
    # If this process has no layers, as in the scheduler, vLLM selects one backend from the configuration.
    backends = get_current_attn_backends(vllm_config)
    return [layout.name for layout in get_supported_kv_cache_layouts(backends)]


def declared_layouts(vllm_config: VllmConfig) -> list[str]:
    """Return the names of the KV cache layouts that all attention backends are certain to support."""
    for backend in get_current_attn_backends(vllm_config):
        # vLLM assumes that a backend without a declaration supports all layouts. This is wrong for some MLA
        # backends: the one for CPUs fails in its first step unless each block is contiguous.
        if backend.is_mla() and backend.supported_kv_cache_layouts() is None:
            return []
    return supported_layouts(vllm_config)


def attention_backends(vllm_config: VllmConfig) -> list[str]:
    """Return the names of the attention backends that the model's layers use."""
    return [str(backend.get_name()) for backend in get_current_attn_backends(vllm_config)]


def takes_whole_blocks(vllm_config: VllmConfig) -> bool:
    """Return True if the kernels of all attention backends can use blocks of the engine's block size."""
    # vLLM splits a block for a kernel that needs smaller ones. It cannot in layouts whose outermost axis is
    # the block, so such layouts must not be used then.
    block = vllm_config.cache_config.block_size
    return all(
        any(
            block % size.base == 0 if isinstance(size, MultipleOf) else block == size
            for size in backend.get_supported_kernel_block_sizes()
        )
        for backend in get_current_attn_backends(vllm_config)
    )


def layers_are_alike(vllm_config: VllmConfig) -> bool:
    """Return True if all layers of the model store the same kind of KV, of the same size per token."""
    model = vllm_config.model_config
    text = model.hf_text_config
    return (
        not model.is_hybrid
        and not model.has_noops
        and len(set(getattr(text, "layer_types", None) or ())) < 2
        and getattr(text, "index_topk", None) is None
        and vllm_config.speculative_config is None
    )


def hook_adapter_loads(listener: Adapters) -> None:
    """Make vLLM call `listener.on_load` before each load of a LoRA adapter through the engine's API.

    Call this in the scheduler's process. Only a weak reference to the listener is kept.
    """
    _LISTENERS.add(listener)

    def add_lora(inner: Callable[..., bool], executor: Executor, lora_request: LoRARequest) -> bool:
        # The call does not tell the engine. So if one engine replaces an adapter in place, all engines of the
        # process stop storing KV of their adapters with this id.
        for each in list(_LISTENERS):
            each.on_load(lora_request)
        return inner(executor, lora_request)

    patch_once(Executor, "add_lora", add_lora)


def hook_weight_changes(vllm_config: VllmConfig, changed: Callable[[], None]) -> None:
    """Make a worker call `changed` each time before it changes the model's weights; mutates the worker.

    The call is made in the thread that runs the worker's steps. Code that writes to the model's parameters
    directly is not detected.
    """
    worker = worker_of(vllm_config)
    models = [model for model in (worker.get_model(), worker.get_draft_model()) if model is not None]
    places = [(worker, _OF_WORKER), (worker.model_runner, _OF_RUNNER), *((one, _OF_MODEL) for one in models)]
    for place, names in places:
        for name in names:
            # Not every release, and not every model, has all of them.
            if (inner := getattr(place, name, None)) is not None:
                setattr(place, name, _calling_first(inner, changed))


def _calling_first(inner: Callable[..., Any], changed: Callable[[], None]) -> Callable[..., Any]:
    @wraps(inner)
    def call(*arguments: Any, **named: Any) -> Any:
        changed()
        return inner(*arguments, **named)

    return call


def processor_settings(model: Any) -> dict[str, Any]:
    """Return the settings of a model's multimodal processor by part, with the user's; empty for a text model.

    Raises:
        Exception: any error of a processor that cannot be created.
    """
    if model.multimodal_config is None or not model.is_multimodal_model:
        return {}
    # Creates it if it does not exist yet.
    processor = cached_processor_from_config(model)
    parts: dict[str, Any] = {name: getattr(processor, name, None) for name in _PROCESSOR_PARTS}
    return {name: part.to_dict() for name, part in parts.items() if hasattr(part, "to_dict")}


def item_data(feature: Any) -> Mapping[str, Any] | None:
    """Return the output of vLLM's processor for an item, by argument of the model; None if not here."""
    # It was not sent to this process, or is in shared memory that only the workers read.
    if feature.data is None or "address" in feature.data:
        return None
    return {name: element.data for name, element in feature.data.items()}


def kind_of_device() -> str:
    """Return the kind of device that computes KV: ``cuda 9.0`` (compute capability), ``cpu``, ..."""
    # Its value, a lazily chosen platform, is not known when this module is imported.
    from vllm.platforms import current_platform  # noqa: PLC0415

    capability = current_platform.get_device_capability()
    kind = str(current_platform.device_type)
    return kind if capability is None else f"{kind} {capability.as_version_str()}"
