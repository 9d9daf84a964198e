"""Scratch caches with the strides of a layer's cache, and writes to them with the backend's own operation."""

from __future__ import annotations

import copy
from typing import Any

import torch

from kvferry.engines.vllm.compat.model import is_indexer, write_index_keys
from kvferry.engines.vllm.content.adapters import INDEX_GROUP
from kvferry.engines.vllm.content.strides import Strides
from kvferry.geometry import Field

Inputs = dict[str, torch.Tensor]
"""Input tensors of a write, by name: ``k`` and, for layers with V, ``v``. Each has the model's dtype and the
shape (tokens, heads, elements per head and token)."""


def write(layer: Any, tensor: torch.Tensor, s: Strides, values: Inputs, fill: int = 0) -> torch.Tensor:
    """Fill block 1 of a new scratch cache of two blocks, with a layer's own cache-write operation.

    Args:
        tensor: cache tensor of the layer; not changed. The scratch cache has the same layout and dtype.
        values: inputs of the operation for every token of the block.
        fill: value of all bytes before the write.

    Returns:
        Bytes of the scratch cache, uint8.
    """
    # Block 0 shows writes before the block that was meant.
    shape = (2 * s.kernel_blocks, *tensor.shape[1:])
    reach = sum((n - 1) * stride for n, stride in zip(shape, tensor.stride(), strict=True)) + 1
    memory = torch.full((reach * s.item,), fill, dtype=torch.uint8, device=tensor.device)
    cache = memory.view(tensor.dtype).as_strided(shape, tensor.stride())
    slots = torch.arange(s.block_tokens, 2 * s.block_tokens, dtype=torch.int64, device=tensor.device)
    if is_indexer(layer):
        keys = values["k"][:, 0, : s.content * INDEX_GROUP // (INDEX_GROUP + 4)]
        write_index_keys(layer, keys.contiguous(), cache.squeeze(1), slots, INDEX_GROUP)
        return memory
    impl = _without_cached_views(layer.impl)
    if "v" in values:
        impl.do_kv_cache_update(layer, values["k"], values["v"], cache, slots)
        return memory
    # MLA's operation takes the latent and the rope part apart.
    latents = values["k"][:, 0]
    width = latents.shape[1] - layer.qk_rope_head_dim
    impl.do_kv_cache_update(
        latents[:, :width].contiguous(), latents[:, None, width:].contiguous(), cache.squeeze(1), slots,
        layer.kv_cache_dtype, layer._k_scale,
    )  # fmt: skip
    return memory


def offsets(field: Field, device: torch.device) -> torch.Tensor:
    """Return the byte offsets of a field's elements in a page: int64 of shape (tokens, heads, content)."""
    found = torch.tensor([field.offset], device=device)
    shape = []
    for name in ("token", "head", "content"):
        axis = field.axis(name)
        along = torch.zeros(1, dtype=torch.int64) if axis is None else torch.from_numpy(axis.offsets())
        found = (found[:, None] + along.to(device)).reshape(-1)
        shape.append(len(along))
    return found.view(shape)


class Reader:
    """Reads fields of block 1 of scratch caches, which `write` fills.

    A probe reads a field after each of its writes, and to compute the positions takes as long as to read.
    """

    def __init__(self, s: Strides) -> None:
        self._s = s
        self._places: dict[Field, torch.Tensor] = {}

    def read(self, memory: torch.Tensor, field: Field) -> torch.Tensor:
        """Return the bytes of a field: uint8 of shape (tokens, heads, content, item bytes)."""
        if field not in self._places:
            self._places[field] = _places(memory, field, self._s, block=1)
        return memory[self._places[field]]


def claimed(memory: torch.Tensor, fields: tuple[Field, ...], s: Strides) -> torch.Tensor:
    """Return a mask of the bytes of a scratch cache that belong to fields of its two pages."""
    found = torch.zeros_like(memory, dtype=torch.bool)
    for field in fields:
        for block in (0, 1):
            found[_places(memory, field, s, block)] = True
    return found


def _places(memory: torch.Tensor, field: Field, s: Strides, block: int) -> torch.Tensor:
    inside = torch.arange(field.item_bytes, device=memory.device)
    return block * s.kernel_blocks * s.kernel + offsets(field, memory.device)[..., None] + inside


def _without_cached_views(impl: Any) -> Any:
    # TRITON_ATTN creates views of the scales in the first cache that it is called with, and keeps using them.
    # The engine's own implementation would later write the scales of the engine's cache to the scratch cache.
    impl = copy.copy(impl)
    for name in ("_k_scale_cache", "_v_scale_cache"):
        if hasattr(impl, name):
            setattr(impl, name, None)
    return impl
