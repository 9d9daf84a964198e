"""Description of a worker's KV cache, from the tensors and configurations that vLLM hands over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from kvferry.engines.vllm.compat.layers import attention_layer, conv_channels_first
from kvferry.engines.vllm.compat.models import pools_every_token
from kvferry.engines.vllm.compat.specs import attention_span_of, is_recurrent, is_ring, kind_of, spec_of_layer
from kvferry.engines.vllm.content import page_of_attention, scales_of, whole_page
from kvferry.engines.vllm.drafts import draft_layers
from kvferry.engines.vllm.heads import shards
from kvferry.engines.vllm.state import Rank, page_of_state
from kvferry.errors import ConfigError
from kvferry.geometry import Group, GroupKind, Layer, PageFormat, RankGeometry, Region


def describe_cache(
    vllm_config: Any, kv_cache_config: Any, caches: Mapping[str, torch.Tensor], tp_rank: int, pp_rank: int
) -> RankGeometry:
    """Describe the memory of a worker's KV cache: groups, layers, page formats and memory regions.

    Args:
        vllm_config: the engine's configuration.
        kv_cache_config: vLLM's configuration of the KV cache.
        caches: cache tensor of each layer, by layer name. The shape is (kernel blocks, heads, tokens,
            content) for attention layers, and (blocks, 1, 1, bytes) for recurrent layers.
        tp_rank, pp_rank: tensor-parallel and pipeline-parallel rank of the worker.

    Raises:
        ConfigError: kvferry cannot move a part of the cache. The message says which part.
    """
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ConfigError(
            "context parallelism (DCP, PCP) splits tokens over ranks, which kvferry cannot move yet"
        )
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
    blocks, kv_groups = kv_cache_config.num_blocks, kv_cache_config.kv_cache_groups
    # Before the pages: a group that kvferry cannot move has no page format.
    kinds = [kind_of_group(group) for group in kv_groups]
    pages = _pages(vllm_config, kv_cache_config, caches, tp_rank)

    def layer(name: str) -> Layer:
        tensor = caches[name]
        # An attention kernel may split a block into several.
        stride = tensor.stride(0) * tensor.element_size() * (tensor.shape[0] // blocks)
        scales = scales_of(attention_layer(vllm_config, name))
        return Layer(name, tensor.data_ptr(), stride, pages[name], scales, draft=drafts.get(name, ""))

    geometry = RankGeometry(
        tp_rank=tp_rank,
        tp_size=parallel.tensor_parallel_size,
        pp_rank=pp_rank,
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


def kind_of_group(group: Any) -> GroupKind:
    """Return the kind of a KV cache group, from vLLM's KVCacheGroupSpec.

    Raises:
        ConfigError: kvferry cannot move the group. The message names one of its layers.
    """
    try:
        return kind_of(group.kv_cache_spec)
    except ConfigError as error:
        raise ConfigError(f"layer {group.layer_names[0]}: {error}") from None


def _pages(
    vllm_config: Any, kv_cache_config: Any, caches: Mapping[str, torch.Tensor], tp_rank: int
) -> dict[str, PageFormat]:
    """Return the format of each layer's pages, by layer name.

    Raises:
        ConfigError: the cache of a layer is missing, or its format cannot be described.
    """
    blocks = kv_cache_config.num_blocks
    size = int(vllm_config.parallel_config.tensor_parallel_size)
    states = Rank(tp_rank, size, conv_channels_first())
    # vLLM disables the transfer of some groups. Their layers are left out.
    layers = {
        name: (attention_layer(vllm_config, name), spec_of_layer(group.kv_cache_spec, name))
        for group in kv_cache_config.kv_cache_groups
        if group.enable_kv_transfer
        for name in group.layer_names
    }
    heads = shards(vllm_config, {name: of for name, of in layers.items() if not is_recurrent(of[1])}, tp_rank)
    pages = {}
    for name, (layer, spec) in layers.items():
        tensor = _checked(name, caches, blocks)
        if is_recurrent(spec):
            pages[name] = page_of_state(layer, name, spec, tensor.device.type, states)
        elif is_ring(spec):
            why = "it is a ring that the layer overwrites in place"
            pages[name] = whole_page(layer, name, spec, tensor, blocks, heads[name], 0, why)
        else:
            pages[name] = page_of_attention(layer, name, spec, tensor, blocks, heads[name])
    return pages


def _checked(name: str, caches: Mapping[str, torch.Tensor], blocks: int) -> torch.Tensor:
    """Return the cache tensor of a layer.

    Raises:
        ConfigError: vLLM has handed over no cache for the layer, or a cache with an unknown shape.
    """
    if name not in caches:
        raise ConfigError(f"vLLM handed over no cache for layer {name}")
    tensor = caches[name]
    if tensor.ndim != 4 or tensor.shape[0] % blocks:
        raise ConfigError(
            f"layer {name}: a cache of shape {tuple(tensor.shape)} for {blocks} blocks is not known"
        )
    return tensor


def _regions(caches: Mapping[str, torch.Tensor]) -> Iterator[Region]:
    """Yield the memory region of each allocation behind the cache tensors."""
    # Several tensors may share an allocation.
    seen = set()
    for tensor in caches.values():
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen:
            continue
        seen.add(storage.data_ptr())
        on_host = tensor.device.type == "cpu"
        yield Region(
            storage.data_ptr(),
            storage.nbytes(),
            "DRAM" if on_host else "VRAM",
            0 if on_host else tensor.device.index or 0,
        )
