"""Description of a worker's KV cache, from the tensors and configurations that vLLM hands over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch

from kvferry.common.errors import ConfigError
from kvferry.engines.vllm.compat.model import (
    attention_layer,
    built_models,
    conv_channels_first,
    pools_every_token,
)
from kvferry.engines.vllm.compat.process import WorkerRanks
from kvferry.engines.vllm.compat.specs import (
    attention_span_of,
    interleave_of,
    is_recurrent,
    is_replicated,
    is_ring,
    kind_of,
    scheduled_groups,
    spec_of_layer,
)
from kvferry.engines.vllm.content import Shard, page_of_attention, scales_of, whole_page
from kvferry.engines.vllm.identity import draft_layers
from kvferry.engines.vllm.state import Rank, page_of_state
from kvferry.geometry import Group, GroupKind, Layer, PageFormat, RankGeometry, Region

_COPIES = "num_kv_head_replicas"


def projections(modules: Iterable[Any], layers: Iterable[Any]) -> dict[int, Any]:
    """Return the QKV projection of each attention layer that has one, by the layer's Python `id`."""
    wanted = {id(layer) for layer in layers}
    found = {}
    for module in modules:
        children = list(module.children())
        # With LoRA, an adapter wraps the projection.
        beside = [one for child in children if hasattr(one := getattr(child, "base_layer", child), _COPIES)]
        # With several projections side by side, which one belongs to the layer is not certain.
        if len(beside) == 1:
            found.update({id(child): beside[0] for child in children if id(child) in wanted})
    return found


def shard_of(held: int, rank: int, ranks: int, projection: Any, of_model: int) -> Shard:
    """Return the range of a layer's KV heads that a rank holds, of which it has `held`.

    >>> shard_of(2, 1, 4, None, 8), shard_of(1, 3, 4, None, 2)
    (Shard(rank=1, ranks=4, start=2, total=8), Shard(rank=3, ranks=4, start=1, total=2))
    >>> shard_of(1, 3, 4, None, 8)  # unknown range, because 4 ranks with 1 head each cannot hold 8 heads
    Shard(rank=3, ranks=4, start=0, total=0)

    Args:
        projection: the layer's `QKVParallelLinear`; None if the layer has none.
        of_model: number of KV heads of the model, which need not be this layer's.
    """
    if projection is not None and int(projection.num_kv_heads) == held:
        copies = int(projection.num_kv_head_replicas)
        start, total = projection.tp_rank // copies * held, projection.tp_size // copies * held
        return Shard(rank, ranks, start, total)
    # A rank has several heads only if none is copied.
    if held > 1 or ranks == 1:
        return Shard(rank, ranks, rank * held, ranks * held)
    # The model's number of heads is not this layer's, or the rank would hold several.
    if of_model > ranks:
        return Shard(rank, ranks, 0, 0)
    return Shard(rank, ranks, rank * of_model // ranks, of_model)


def shards(vllm_config: Any, layers: Mapping[str, tuple[Any, Any]], rank: int) -> dict[str, Shard]:
    """Return the KV heads that this rank holds, from (attention layer, its spec), by layer name."""
    ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    of_model = int(vllm_config.model_config.get_total_num_kv_heads())
    found = {}
    if ranks > 1:  # a single rank holds all heads
        models = built_models(vllm_config)
        modules = chain(*(model.modules() for model in (models.target, models.draft) if model is not None))
        found = projections(modules, (layer for layer, _ in layers.values()))
    return {
        name: Shard(rank, ranks, 0, 1)  # a latent, the same on every rank
        if is_replicated(spec)
        else shard_of(int(spec.num_kv_heads), rank, ranks, found.get(id(layer)), of_model)
        for name, (layer, spec) in layers.items()
    }


def describe_cache(
    vllm_config: Any, kv_cache_config: Any, caches: Mapping[str, torch.Tensor], ranks: WorkerRanks
) -> RankGeometry:
    """Describe the memory of a worker's KV cache: groups, layers, page formats and memory regions.

    Args:
        caches: cache tensor of each layer, by layer name. The shape is (kernel blocks, heads, tokens,
            content) for attention layers, and (blocks, 1, 1, bytes) for recurrent layers.

    Raises:
        ConfigError: kvferry cannot move a part of the cache.
    """
    parallel = vllm_config.parallel_config
    stage_ranks = _stage_ranks(parallel)
    if not kv_cache_config.kv_cache_groups:
        raise ConfigError(
            "this model keeps no KV cache (an encoder, for instance): there is nothing to move or to store; "
            "serve it without a KV connector"
        )
    if pooling := pools_every_token(vllm_config):
        raise ConfigError(
            f"this model pools over every token of a prompt ({pooling}), and tokens that are loaded are not "
            "computed; serve it without a KV connector"
        )
    drafts = draft_layers(vllm_config)
    blocks, kv_groups = kv_cache_config.num_blocks, scheduled_groups(vllm_config, kv_cache_config)
    # Before the pages: a group that kvferry cannot move has no page format.
    kinds = [kind_of_group(group) for group in kv_groups]
    pages = _pages(vllm_config, kv_cache_config, caches, ranks)

    def layer(name: str) -> Layer:
        tensor = caches[name]
        # An attention kernel may split a block into several.
        stride = tensor.stride(0) * tensor.element_size() * (tensor.shape[0] // blocks)
        scales = scales_of(attention_layer(vllm_config, name))
        return Layer(name, tensor.data_ptr(), stride, pages[name], scales, draft=drafts.get(name, ""))

    geometry = RankGeometry(
        # As vLLM numbers the workers' handshakes.
        tp_rank=ranks.pcp * parallel.tensor_parallel_size + ranks.tp,
        tp_size=stage_ranks,
        pp_rank=ranks.pp,
        pp_size=parallel.pipeline_parallel_size,
        num_blocks=blocks,
        groups=tuple(
            Group(
                kind,
                group.kv_cache_spec.block_size,
                attention_span_of(group.kv_cache_spec),
                tuple(layer(name) for name in group.layer_names if name in pages),
            )
            for kind, group in zip(kinds, kv_groups, strict=True)
        ),
        regions=tuple(_regions(caches)),
    )
    geometry.check()
    return geometry


def _stage_ranks(parallel: Any) -> int:
    """Return the number of ranks of a pipeline stage."""
    tp, pcp = int(parallel.tensor_parallel_size), int(parallel.prefill_context_parallel_size)
    if pcp > 1 and parallel.decode_context_parallel_size == 1:
        # vLLM keys the workers' handshakes by stage and tensor-parallel rank, so one replaces the others.
        raise ConfigError(
            f"prefill context parallelism (PCP) of {pcp} ranks without decode context parallelism (DCP): all "
            "of them have the same KV, and vLLM names only one of them to the scheduler; set "
            f"--decode-context-parallel-size to {pcp} or {tp * pcp}, or --prefill-context-parallel-size to 1"
        )
    return tp * pcp


def kind_of_group(group: Any) -> GroupKind:
    """Return the kind of one of vLLM's KVCacheGroupSpec, or raise a ConfigError that names a layer."""
    try:
        return kind_of(group.kv_cache_spec)
    except ConfigError as error:
        raise ConfigError(f"layer {group.layer_names[0]}: {error}") from None


def _pages(
    vllm_config: Any, kv_cache_config: Any, caches: Mapping[str, torch.Tensor], ranks: WorkerRanks
) -> dict[str, PageFormat]:
    blocks = kv_cache_config.num_blocks
    size = int(vllm_config.parallel_config.tensor_parallel_size)
    states = Rank(ranks.tp, size, conv_channels_first())
    # vLLM disables the transfer of some groups. Their layers are left out.
    layers = {
        name: (attention_layer(vllm_config, name), spec_of_layer(group.kv_cache_spec, name))
        for group in kv_cache_config.kv_cache_groups
        if group.enable_kv_transfer
        for name in group.layer_names
    }
    heads = shards(
        vllm_config, {name: of for name, of in layers.items() if not is_recurrent(of[1])}, ranks.tp
    )
    pages = {}
    for name, (layer, spec) in layers.items():
        tensor = _checked(name, caches, blocks)
        interleave = interleave_of(vllm_config, spec, ranks.dcp)
        if is_recurrent(spec):
            pages[name] = page_of_state(layer, name, spec, tensor.device.type, states)
        elif is_ring(spec):
            why = "it is a ring that the layer overwrites in place"
            pages[name] = whole_page(layer, name, spec, tensor, blocks, heads[name], 0, why)
        else:
            pages[name] = page_of_attention(layer, name, spec, tensor, blocks, heads[name], interleave)
    return pages


def _checked(name: str, caches: Mapping[str, torch.Tensor], blocks: int) -> torch.Tensor:
    if name not in caches:
        raise ConfigError(f"vLLM handed over no cache for layer {name}")
    tensor = caches[name]
    if tensor.ndim != 4 or tensor.shape[0] % blocks:
        raise ConfigError(
            f"layer {name}: a cache of shape {tuple(tensor.shape)} for {blocks} blocks is not known"
        )
    return tensor


def _regions(caches: Mapping[str, torch.Tensor]) -> Iterator[Region]:
    # Several tensors may share an allocation.
    seen = set()
    for tensor in caches.values():
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            device = ("DRAM", 0) if tensor.device.type == "cpu" else ("VRAM", tensor.device.index or 0)
            yield Region(storage.data_ptr(), storage.nbytes(), *device)
