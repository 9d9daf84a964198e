"""What depends on vLLM's version: every import and attribute that moves between releases.

Written against vLLM 0.32; a contract test introspects the installed one.
"""

from __future__ import annotations

import copy
import gc
import logging
import re
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from vllm import _custom_ops, envs
from vllm.config import (
    KVTransferConfig,
    VllmConfig,
    get_current_vllm_config_or_none,
    set_current_vllm_config,
)
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.kv_events import KVConnectorKVEvents
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.tracing import SpanAttributes, extract_trace_context, is_tracing_available
from vllm.transformers_utils.processor import cached_processor_from_config
from vllm.utils.network_utils import get_ip
from vllm.utils.torch_utils import resolve_kv_cache_dtype_string
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from kvferry.engines.vllm.specs import (
    has_rings,
    is_recurrent,
    is_replicated,
    is_ring,
    kind_of,
    layer_specs,
    names_prompts_only,
    reach_of,
    snapshot_tokens,
    spec_of_layer,
    state_position,
)
from kvferry.errors import ConfigError
from kvferry.tiers.names import FILE, HOST, OBJECT, PEER

__all__ = [
    "HITS",
    "REQUEST_ID",
    "CacheHitSource",
    "KVCacheConfig",
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorKVEvents",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "SupportsHMA",
    "VllmConfig",
    "after_forward",
    "attention_backends",
    "attention_layer",
    "built_model",
    "cache_dtype",
    "class_of",
    "config_of",
    "connector_class",
    "conv_channels_first",
    "current_config",
    "declared_layouts",
    "defer_frees",
    "draft_layer_names",
    "external_id",
    "finished_whole",
    "has_rings",
    "is_indexer",
    "is_recurrent",
    "is_replicated",
    "is_ring",
    "is_traced",
    "item_data",
    "keeps_draft_layers",
    "kind_of",
    "layers_are_alike",
    "leave_cores_to_others",
    "names_prompts_only",
    "node_address",
    "operators_layout",
    "parent_of",
    "processor_settings",
    "ranks",
    "reach_of",
    "reads_ahead",
    "reads_no_cache",
    "register",
    "share_logging",
    "snapshot_tokens",
    "spec_of_layer",
    "state_dtypes",
    "state_position",
    "supported_layouts",
    "supports_hybrid",
    "takes_whole_blocks",
    "trace_context",
    "trim_prompt",
    "waits_for_blocks",
    "with_connector",
    "with_extra",
    "write_index_keys",
]

HITS = {
    PEER: CacheHitSource.P2P,
    HOST: CacheHitSource.HOST,
    FILE: CacheHitSource.DISK,
    OBJECT: CacheHitSource.EXTERNAL_UNSPECIFIED,
}
"""How vLLM's own counters label tokens, by where they came from."""


def after_forward() -> Callable[[], None]:
    """Waits, in any thread, until what the engine has given its device so far is done."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return lambda: None
    event = torch.cuda.Event()
    event.record()
    wait: Callable[[], None] = event.synchronize
    return wait


def share_logging() -> None:
    """Let kvferry's log lines come out where vLLM's do, in the same form and from the same level on."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("kvferry")
    if theirs.handlers and not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False


_LOOK_SECONDS = 20e-6


def leave_cores_to_others(vllm_config: VllmConfig) -> None:
    """Let an engine on CPUs sleep between two looks at its queues, where vLLM spins over ``sched_yield``.

    An engine steps for as long as a lease or a load is open, and with several processes on few cores that
    spinning held up messages of the control channel for 4 to 60 s (two ranks on two cores, Linux 6.18); with
    this, for 11 ms.
    """
    if vllm_config.device_config.device_type == "cpu":
        shm_broadcast.sched_yield = lambda: time.sleep(_LOOK_SECONDS)


def ranks() -> tuple[int, int]:
    """This worker's (tp_rank, pp_rank)."""
    return int(get_tp_group().rank_in_group), int(get_pp_group().rank_in_group)


def current_config() -> Any:
    """The configuration of the engine that is being set up, None outside of that."""
    return get_current_vllm_config_or_none()


def attention_layer(vllm_config: VllmConfig, name: str) -> Any:
    """The engine's layer object of that name."""
    return vllm_config.compilation_config.static_forward_context[name]


def is_indexer(layer: Any) -> bool:
    """The layer only holds the fp8 keys of a sparse indexer: DeepSeek V3.2, GLM-5."""
    return layer.get_attn_backend().get_name() == "DEEPSEEK_V32_INDEXER" and layer.dtype is torch.uint8


def write_index_keys(
    layer: Any, keys: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, group: int
) -> None:
    """Quantise an indexer's keys into its cache, as vLLM does for CUDA.

    Args:
        layer: as of `is_indexer`.
        keys: (tokens, width), a multiple of `group` elements each.
        cache: uint8 of shape (blocks, tokens, bytes).
        slots: int64, one per token.
        group: elements of a key to a scale.

    Raises:
        RuntimeError: this backend's keys are shuffled.
        AttributeError: there is no such operation here.
    """
    if layer.uses_shuffled_layout:
        raise RuntimeError("its indexer's keys are shuffled")
    _custom_ops.indexer_k_quant_and_cache(keys.to(torch.bfloat16), cache, slots, group, "ue8m0")


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


def conv_channels_first() -> bool:
    """Convolution states are (channels, window), rather than (window, channels)."""
    return bool(is_conv_state_dim_first())


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


def cache_dtype(vllm_config: VllmConfig) -> str:
    """The element type of the KV cache as it was resolved."""
    model = vllm_config.model_config
    named: str = resolve_kv_cache_dtype_string(str(vllm_config.cache_config.cache_dtype), model)
    resolved = {"auto": str(model.dtype).removeprefix("torch."), "fp8": "fp8_e4m3"}
    return resolved.get(named, named)


def state_dtypes(kv_cache_config: KVCacheConfig) -> str:
    """Element types of recurrent state as they were resolved; empty without any."""
    groups = kv_cache_config.kv_cache_groups
    layers = [layer for group in groups for layer in layer_specs(group.kv_cache_spec).values()]
    found = {tuple(layer.dtypes) for layer in layers if is_recurrent(layer)}
    return " | ".join(sorted(", ".join(str(one).removeprefix("torch.") for one in each) for each in found))


def processor_settings(model: Any) -> dict[str, Any]:
    """The multimodal processor's effective configuration, by its parts; empty for a model without one.

    Overrides (`mm_processor_kwargs`) are in it. vLLM's scheduler has made the processor by now.

    Raises:
        Exception: whatever a processor raises that cannot be made.
    """
    if model.multimodal_config is None or not model.is_multimodal_model:
        return {}
    processor = cached_processor_from_config(model)
    parts: dict[str, Any] = {name: getattr(processor, name, None) for name in _PROCESSOR_PARTS}
    return {name: part.to_dict() for name, part in parts.items() if hasattr(part, "to_dict")}


_PROCESSOR_PARTS = ("image_processor", "video_processor", "feature_extractor", "audio_processor")


def item_data(feature: Any) -> Mapping[str, Any] | None:
    """What the processor made of an image, a video or a piece of audio: the model's arguments by name.

    None where the scheduler does not have it: it is in a worker's shared memory, or was not sent.
    """
    if feature.data is None or "address" in feature.data:
        return None
    return {name: element.data for name, element in feature.data.items()}


def finished_whole(request: Any) -> bool:
    """The request ended by itself: everything it was to compute has been computed."""
    return request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


def own_hit(request: Any) -> int | None:
    """Tokens that the engine's own prefix cache had of a request when it was admitted.

    None of one that was preempted: it is said of first admissions only.
    """
    stats = None if request.num_preemptions else request.prefill_stats
    return None if stats is None else int(stats.num_local_cached_tokens)


def defer_frees(vllm_config: VllmConfig) -> None:
    """Let vLLM give blocks back only when no step in flight writes them; mutates the role in `vllm_config`.

    With overlapping steps an aborted or preempted request's blocks may still be written, unordered with a
    load that is given them. vLLM waits for that in engines whose role is to load, and reads the role right
    after it has made the connector. A prefill engine of ours loads as well: from tiers, and earlier turns
    from the engine that decoded them.
    """
    transfer = vllm_config.kv_transfer_config
    if not transfer.is_kv_consumer:
        transfer.kv_role = "kv_both"


def reads_no_cache(request: Any) -> str | None:
    """Why vLLM lets a request read no cache, neither its own nor a connector's; None if it may."""
    if not request.skip_reading_prefix_cache:
        return None
    if _scores_prompt(request.sampling_params):
        return "logprobs of its prompt are asked for (prompt_logprobs, or echo with logprobs)"
    return "it asks to read no cache (skip_reading_prefix_cache)"


def waits_for_blocks(request: Any) -> bool:
    """The request has no blocks yet, or none any more."""
    return request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def trim_prompt(request: Any, hash_block_tokens: int | None, *, says_dropped: bool = False) -> bool:
    """Drop the last prompt token of a request that computes a prompt for another engine; mutates `request`.

    The consumer always computes the last token itself, to sample from it, and recurrent state that has
    seen it already could not be used.

    Returns:
        False, and the request is as it was, if there is only one token, if the prompt is not made of token
        ids, if logprobs of the prompt are wanted (the answer has them for every token), or if the request
        reads no cache: its consumer would load nothing.

    Args:
        request: vLLM's.
        hash_block_tokens: tokens of a block that is hashed, None or 0 without prefix caching.
        says_dropped: have the engine sample the dropped token. A draft model combines what the model computes
            of a token with the token after it; of the last one that is what was sampled.
    """
    if request.num_prompt_tokens < 2 or request.prompt_token_ids is None or request.prompt_embeds is not None:
        return False
    if _scores_prompt(request.sampling_params) or reads_no_cache(request) is not None:
        return False
    if says_dropped and request.sampling_params is not None and request.structured_output_request is None:
        # A copy: requests made of one list of prompts share their parameters.
        request.sampling_params = copy.copy(request.sampling_params)
        request.sampling_params.allowed_token_ids = [request.prompt_token_ids[-1]]
    # In an engine that shares its process with the API, samples of one prompt share this list.
    request.prompt_token_ids = request.prompt_token_ids[:-1]
    del request._all_token_ids[-1:]
    request.num_prompt_tokens -= 1
    request.max_tokens = 1
    if hash_block_tokens:
        del request.block_hashes[request.num_prompt_tokens // hash_block_tokens :]
    return True


def _scores_prompt(sampling: Any) -> bool:
    return sampling is not None and (
        sampling.prompt_logprobs is not None or sampling.prompt_logprob_token_ids is not None
    )


def node_address() -> str:
    """Address of this machine among the engine's own: ``VLLM_HOST_IP``, or that of the default route."""
    return str(get_ip())


# -- layouts ----------------------------------------------------------------------------------------------


def operators_layout() -> str | None:
    """What the operator has set; vLLM then asks no connector."""
    named: str | None = envs.VLLM_KV_CACHE_LAYOUT
    return named


def supported_layouts(vllm_config: VllmConfig) -> list[str]:
    """Layouts that every attention backend of the model declares; all of them if none declares any.

    The engine core of several workers has no layers of its own: it is told the one they would choose.
    """
    backends = get_current_attn_backends(vllm_config)
    return [layout.name for layout in get_supported_kv_cache_layouts(backends)]


def declared_layouts(vllm_config: VllmConfig) -> list[str]:
    """The same, of backends whose word can be taken.

    None means "any" to vLLM, but MLA backends that say so need not have meant it: the one for CPUs fails in
    its first step over blocks that are not side by side.
    """
    for backend in get_current_attn_backends(vllm_config):
        if backend.is_mla() and backend.supported_kv_cache_layouts() is None:
            return []
    return supported_layouts(vllm_config)


def attention_backends(vllm_config: VllmConfig) -> list[str]:
    """Names of the attention backends that the model's layers have."""
    return [str(backend.get_name()) for backend in get_current_attn_backends(vllm_config)]


def takes_whole_blocks(vllm_config: VllmConfig) -> bool:
    """Whether kernels take the engine's blocks whole: with blocks outermost vLLM does not split them."""
    block = vllm_config.cache_config.block_size
    return all(
        any(
            block % size.base == 0 if isinstance(size, MultipleOf) else block == size
            for size in backend.get_supported_kernel_block_sizes()
        )
        for backend in get_current_attn_backends(vllm_config)
    )


def layers_are_alike(vllm_config: VllmConfig) -> bool:
    """Whether all layers keep the same for a token: one kind of attention, no draft model, no indexer."""
    model = vllm_config.model_config
    text = model.hf_text_config
    return (
        not model.is_hybrid
        and not model.has_noops
        and len(set(getattr(text, "layer_types", None) or ())) < 2
        and getattr(text, "index_topk", None) is None
        and vllm_config.speculative_config is None
    )


# -- tracing ----------------------------------------------------------------------------------------------

REQUEST_ID: str = SpanAttributes.GEN_AI_REQUEST_ID
"""What vLLM's own span of a request calls its id."""


def is_traced(vllm_config: VllmConfig) -> bool:
    """The engine exports spans: vLLM has set up OpenTelemetry in the scheduler's process."""
    return vllm_config.observability_config.otlp_traces_endpoint is not None and is_tracing_available()


def trace_context(headers: Mapping[str, str]) -> Any:
    """The context that a request's headers name, None if they name none."""
    return extract_trace_context(headers)


def external_id(request_id: str) -> str:
    """A request's id as vLLM's callers know it: the scheduler's ends with eight random digits."""
    return re.sub(r"-[0-9a-f]{8}$", "", request_id)


def parent_of(request_id: str) -> str | None:
    """The id that samples of one prompt (``n`` above 1) share; None of a request that is no such sample.

    vLLM puts a number before the id of the whole, which ends with eight random digits.
    """
    found = re.fullmatch(r"\d+_(.*-[0-9a-f]{8})", request_id, re.DOTALL)
    return None if found is None else found.group(1)


def register(name: str, module: str) -> None:
    """Make a connector class known by name, by which alone vLLM's MultiConnector finds whose stats it has."""
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, module, name)


# -- connectors within a connector ------------------------------------------------------------------------


def with_connector(vllm_config: VllmConfig, transfer: Mapping[str, Any]) -> VllmConfig:
    """The same configuration with another connector; what is not the connector's is shared.

    Raises:
        ValueError, TypeError: settings that vLLM refuses.
    """
    config = copy.copy(vllm_config)
    config.kv_transfer_config = KVTransferConfig(**transfer)
    return config


def with_extra(vllm_config: VllmConfig, more: Mapping[str, Any]) -> VllmConfig:
    """The same configuration with more settings of the connector's own."""
    config = copy.copy(vllm_config)
    config.kv_transfer_config = copy.copy(config.kv_transfer_config)
    config.kv_transfer_config.kv_connector_extra_config = {
        **config.kv_transfer_config.kv_connector_extra_config,
        **more,
    }
    return config


def connector_class(vllm_config: VllmConfig) -> Any:
    """The class of a configuration's connector.

    Raises:
        ValueError, ImportError, AttributeError: there is none of that name.
    """
    return KVConnectorFactory.get_connector_class(vllm_config.kv_transfer_config)


def class_of(transfer: Mapping[str, Any]) -> Any:
    """The same, of a connector's settings alone."""
    return KVConnectorFactory.get_connector_class(KVTransferConfig(**{"kv_role": "kv_both", **transfer}))


def supports_hybrid(vllm_config: VllmConfig) -> bool:
    """Whether a configuration's connector can do with the hybrid KV cache manager."""
    return bool(KVConnectorFactory.supports_hma_config(vllm_config.kv_transfer_config))


def config_of(vllm_config: VllmConfig) -> AbstractContextManager[Any]:
    """While it lasts, this is the configuration of the engine that is being set up."""
    context: AbstractContextManager[Any] = set_current_vllm_config(vllm_config)
    return context
