"""A worker's KV cache as vLLM hands it over, described."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from kvferry.engines.vllm import compat
from kvferry.engines.vllm.content import Shard, page_of_attention
from kvferry.engines.vllm.state import Rank, page_of_state
from kvferry.errors import ConfigError
from kvferry.geometry import Group, GroupKind, Layer, RankGeometry, Region


def describe_cache(
    vllm_config: Any, kv_cache_config: Any, caches: Mapping[str, torch.Tensor], tp_rank: int, pp_rank: int
) -> RankGeometry:
    """Describe the cache of this worker.

    Args:
        vllm_config, kv_cache_config: vLLM's.
        caches: layer name to its tensor: attention (kernel blocks, heads, tokens, content), state (blocks,
            1, 1, bytes).
        tp_rank, pp_rank: which worker.

    Raises:
        ConfigError: the cache holds something that cannot be moved; says what.
    """
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ConfigError(
            "context parallelism (DCP, PCP) splits tokens over ranks, which kvferry cannot move yet"
        )
    groups = tuple(
        Group(
            kind_of(group),
            group.kv_cache_spec.block_size,
            compat.reach_of(group.kv_cache_spec),
            tuple(_layers(vllm_config, kv_cache_config, group, caches, tp_rank)),
        )
        for group in kv_cache_config.kv_cache_groups
    )
    geometry = RankGeometry(
        tp_rank,
        parallel.tensor_parallel_size,
        pp_rank,
        parallel.pipeline_parallel_size,
        kv_cache_config.num_blocks,
        groups,
        tuple(_regions(caches)),
    )
    geometry.check()
    return geometry


def kind_of(group: Any) -> GroupKind:
    """What a continuation needs of a group.

    Raises:
        ConfigError: a KV cache spec that kvferry does not know.
    """
    kind = compat.kind_of(group.kv_cache_spec)
    if kind is None:
        raise ConfigError(
            f"KV cache spec {type(group.kv_cache_spec).__name__} (layer {group.layer_names[0]}) is not one "
            "that kvferry can move; serve this model without a KV connector"
        )
    return kind


def _layers(
    vllm_config: Any, kv_cache_config: Any, group: Any, caches: Mapping[str, torch.Tensor], tp_rank: int
) -> Iterator[Layer]:
    if not group.enable_kv_transfer:
        return
    for name in group.layer_names:
        if name not in caches:
            raise ConfigError(f"vLLM handed over no cache for layer {name}")
        yield _layer(vllm_config, kv_cache_config, group, name, caches[name], tp_rank)


def _layer(
    vllm_config: Any, kv_cache_config: Any, group: Any, name: str, tensor: torch.Tensor, tp_rank: int
) -> Layer:
    blocks = kv_cache_config.num_blocks
    spec = compat.spec_of_layer(group.kv_cache_spec, name)
    if tensor.ndim != 4 or tensor.shape[0] % blocks:
        raise ConfigError(
            f"layer {name}: a cache of shape {tuple(tensor.shape)} for {blocks} blocks is not known"
        )
    stride = tensor.stride(0) * tensor.element_size() * (tensor.shape[0] // blocks)
    size = vllm_config.parallel_config.tensor_parallel_size
    layer = compat.attention_layer(vllm_config, name)
    if kind_of(group) is GroupKind.STATE:
        rank = Rank(tp_rank, size, compat.conv_channels_first())
        page = page_of_state(layer, name, spec, tensor.device.type, rank)
    else:
        page = page_of_attention(layer, name, spec, tensor, blocks, _heads(vllm_config, spec, tp_rank))
    return Layer(name, tensor.data_ptr(), stride, page)


def _heads(vllm_config: Any, spec: Any, tp_rank: int) -> Shard:
    """Which heads a rank holds: a share of them, or a copy where there are fewer heads than ranks."""
    size = vllm_config.parallel_config.tensor_parallel_size
    total = vllm_config.model_config.get_total_num_kv_heads()
    if total >= size or spec.num_kv_heads > 1:
        return Shard(tp_rank, size, tp_rank * spec.num_kv_heads, size * spec.num_kv_heads)
    return Shard(tp_rank, size, tp_rank * total // size, total)


def _regions(caches: Mapping[str, torch.Tensor]) -> Iterator[Region]:
    """Every allocation behind the tensors, once: layers and groups may share one."""
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
