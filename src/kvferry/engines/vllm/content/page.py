"""Page formats of attention layers: fields whose positions are proved, or opaque bytes."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from kvferry.engines.vllm.compat.specs import is_replicated
from kvferry.engines.vllm.content import cells, probe
from kvferry.engines.vllm.content.adapters import ADAPTERS, fields_of
from kvferry.engines.vllm.content.strides import Shard, strides_of
from kvferry.engines.vllm.content.values import element_types
from kvferry.geometry import Field, PageFormat
from kvferry.geometry.page import whole_page as whole_page_of

logger = logging.getLogger(__name__)


def page_of_attention(
    layer: Any, name: str, spec: Any, tensor: torch.Tensor, num_blocks: int, shard: Shard
) -> PageFormat:
    """Describe the pages of an attention layer (a page is the layer's part of a block).

    The pages are described as fields, if writes to a scratch cache confirm the positions of the fields. Other
    pages are described as opaque bytes, which can only move whole.

    Args:
        layer: the engine's attention layer, for its backend and cache-write operation.
        name: name of the layer, for messages.
        spec: KV cache spec of the layer.
        tensor: cache tensor of the layer, of shape (kernel blocks, head slots, tokens, content). A head slot
            is an entry of the head axis: K and V together, or only one of them.
        num_blocks: number of blocks in the cache, as vLLM's block tables count them. Such a block may consist
            of several kernel blocks.
        shard: range of the layer's KV heads that this rank holds.
    """
    fields: tuple[Field, ...] = ()
    if not shard.total:
        why = f"which of the model's KV heads rank {shard.rank} holds is not certain"
    elif spec.tokens_per_state != 1:
        why = f"a state stands for {spec.tokens_per_state} tokens"
    else:
        fields, why = _proved(layer, spec, tensor, num_blocks, shard)
    if not fields:
        return whole_page(
            layer,
            name=name,
            spec=spec,
            tensor=tensor,
            num_blocks=num_blocks,
            shard=shard,
            block_tokens=spec.block_size,
            why=why,
        )
    reach = max(field.extent()[1] for field in fields)
    return PageFormat(content_id(layer, spec, tensor), spec.block_size, reach, fields)


def content_id(layer: Any, spec: Any, tensor: torch.Tensor) -> str:
    """Return a text that identifies the meaning of the bytes in a layer's cache.

    The text consists of the backend's name, the CPU instruction set of its kernels (``layer.isa``; empty if
    not set), the tensor's dtype and the KV cache dtype, joined by colons.
    """
    return ":".join(
        [_backend(layer), str(getattr(layer, "isa", "")), str(tensor.dtype), _kv_dtype(layer, spec)]
    )


def _backend(layer: Any) -> str:
    return str(layer.get_attn_backend().get_name())


def _kv_dtype(layer: Any, spec: Any) -> str:
    """Return the name of a layer's KV cache dtype.

    It is read from the layer or, if the layer does not state it (a sparse indexer, for example), from the
    layer's KV cache spec. If neither states it, the result is ``auto``.
    """
    return str(getattr(layer, "kv_cache_dtype", None) or getattr(spec, "cache_dtype_str", None) or "auto")


def whole_page(
    layer: Any,
    name: str,
    spec: Any,
    tensor: torch.Tensor,
    num_blocks: int,
    shard: Shard,
    block_tokens: int,
    why: str,
) -> PageFormat:
    """Describe pages of unknown content, as opaque bytes that can only move whole.

    Such pages can move only between engines whose pages have the same shape, strides and block size. The
    content id contains shape and strides, so that the engines notice a difference. Unless all ranks hold the
    same bytes, the engines must also have the same number of ranks. Each rank then reads from the rank with
    the same index.

    Args:
        layer: the engine's layer, for its backend.
        name: name of the layer, for the log.
        spec: KV cache spec of the layer.
        tensor: cache tensor of the layer.
        num_blocks: number of blocks in the cache, as vLLM's block tables count them.
        shard: range of the layer's KV heads that this rank holds.
        block_tokens: number of tokens per block; 0 for a ring (one block per request, overwritten in place).
        why: reason why the content is unknown, for the log.
    """
    content = content_id(layer, spec, tensor)
    logger.warning(
        "layer %s: content of %s pages is not known (%s): they move whole, between equal blocks and ranks",
        name, content, why,
    )  # fmt: skip
    ranks = 1 if is_replicated(spec) else shard.ranks
    item = tensor.element_size()
    return whole_page_of(
        content,
        block_tokens,
        (tensor.shape[0] // num_blocks, *tensor.shape[1:]),
        [stride * item for stride in tensor.stride()],
        item_bytes=item,
        rank=shard.rank if ranks > 1 else 0,
        ranks=ranks,
    )


def _proved(
    layer: Any, spec: Any, tensor: torch.Tensor, num_blocks: int, shard: Shard
) -> tuple[tuple[Field, ...], str]:
    """Return the first description of a layer's pages that is confirmed by writes to a scratch cache.

    The function tries the descriptions that kvferry has for the layer's backend, in order. If none is
    confirmed, it tries a page of cells (the contiguous bytes of one head and token).

    Args:
        layer: the engine's attention layer, for its backend and cache-write operation.
        spec: KV cache spec of the layer.
        tensor: cache tensor of the layer; not changed.
        num_blocks: number of blocks in the cache, as vLLM's block tables count them.
        shard: range of the layer's KV heads that this rank holds.

    Returns:
        Fields of the page, and an empty string. If no description is confirmed, an empty tuple, and the
        reason.
    """
    s, backend, kv_dtype = strides_of(tensor, spec, num_blocks), _backend(layer), _kv_dtype(layer, spec)
    reasons = dict[str, None]()
    for adapter in ADAPTERS.get(backend, ()):
        written = adapter(s, shard)
        if not written:
            continue
        types = element_types(kv_dtype, tensor.dtype)
        for element in types:
            why = probe.find_mismatch(layer, tensor, s, written, element)
            if not why:
                fields = fields_of(written)
                return fields if element is types[0] else _with_element_name(element, fields), ""
            reasons[why] = None
    field = cells.cell_field(s, shard, f"{kv_dtype} of {backend}")
    if field is not None:
        why = cells.find_mismatch(layer, tensor, s, field)
        if not why:
            return (field,), ""
        reasons[why] = None
    return (), next(iter(reasons), "no content adapter fits them")


def _with_element_name(element: torch.dtype, fields: tuple[Field, ...]) -> tuple[Field, ...]:
    """Return copies of fields with the element type added to each name (``k in float8_e4m3fn``).

    This is needed if a backend's element type is not the one that the KV cache dtype names. With the type in
    their names, the fields match only fields of the same element type in other engines.

    Args:
        element: element type that the backend stores.
        fields: fields of a page.
    """
    kind = str(element).removeprefix("torch.")
    return tuple(replace(field, name=f"{field.name} in {kind}") for field in fields)
