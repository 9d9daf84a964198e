"""Page formats of attention layers: fields whose positions are proved, or opaque bytes."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from kvferry.engines.vllm.compat.specs import is_replicated
from kvferry.engines.vllm.content import cells, probe
from kvferry.engines.vllm.content.adapters import ADAPTERS, fields_of
from kvferry.engines.vllm.content.probe import element_types
from kvferry.engines.vllm.content.strides import Shard, strides_of
from kvferry.geometry import NOT_INTERLEAVED, Field, Interleave, PageFormat
from kvferry.geometry.page import whole_page as whole_page_of

logger = logging.getLogger(__name__)


def page_of_attention(
    layer: Any,
    name: str,
    spec: Any,
    tensor: torch.Tensor,
    num_blocks: int,
    shard: Shard,
    interleave: Interleave = NOT_INTERLEAVED,
) -> PageFormat:
    """Describe the pages of an attention layer: as fields if they are proved, else as opaque bytes.

    Args:
        name: name of the layer, for messages.
        tensor: cache tensor of the layer, of shape (kernel blocks, head slots, tokens, content).
        num_blocks: number of blocks in the cache, as vLLM's block tables count them.
        interleave: which tokens of a block the page holds.
    """
    block_tokens = spec.block_size * interleave.ranks
    fields: tuple[Field, ...] = ()
    if not shard.total:
        why = f"which of the model's KV heads rank {shard.rank} holds is not certain"
    elif spec.tokens_per_state != 1:
        # The token axis of such a tensor counts states.
        why = f"a state stands for {spec.tokens_per_state} tokens"
    else:
        fields, why = _proved(layer, spec, tensor, num_blocks, shard)
    if not fields:
        return whole_page(layer, name, spec, tensor, num_blocks, shard, block_tokens, why, interleave)
    reach = max(field.extent()[1] for field in fields)
    return PageFormat(_content_id(layer, spec, tensor), block_tokens, reach, fields, interleave)


def _content_id(layer: Any, spec: Any, tensor: torch.Tensor) -> str:
    """Return a text that identifies the meaning of the bytes in a layer's cache."""
    # CPU kernels of different instruction sets have different formats.
    isa = str(getattr(layer, "isa", ""))
    return ":".join([_backend(layer), isa, str(tensor.dtype), _kv_dtype(layer, spec)])


def _backend(layer: Any) -> str:
    return str(layer.get_attn_backend().get_name())


def _kv_dtype(layer: Any, spec: Any) -> str:
    # Some layers do not state it, such as a sparse indexer.
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
    interleave: Interleave = NOT_INTERLEAVED,
) -> PageFormat:
    """Describe pages of unknown content, as opaque bytes that can only move whole.

    Such pages can move only between engines whose pages have the same shape, strides and block size. Unless
    all ranks hold the same bytes, each rank reads from the rank with the same index.

    Args:
        block_tokens: number of tokens per block; 0 for a ring.
        why: reason why the content is unknown, for the log.
    """
    content = _content_id(layer, spec, tensor)
    if interleave != NOT_INTERLEAVED:
        # The planner cannot divide such a page, so its tokens are a part of what it is.
        content += f" of {interleave.size} tokens in turn"
    logger.warning(
        "layer %s: content of %s pages is not known (%s): they move whole, between equal blocks and ranks",
        name, content, why,
    )  # fmt: skip
    # With copies of a head, it is tensor-parallel ranks that divide the tokens.
    rank, ranks = (interleave.rank, interleave.ranks) if is_replicated(spec) else (shard.rank, shard.ranks)
    item = tensor.element_size()
    return whole_page_of(
        content,
        block_tokens,
        (tensor.shape[0] // num_blocks, *tensor.shape[1:]),
        [stride * item for stride in tensor.stride()],
        item_bytes=item,
        rank=rank,
        ranks=ranks,
    )


def _proved(
    layer: Any, spec: Any, tensor: torch.Tensor, num_blocks: int, shard: Shard
) -> tuple[tuple[Field, ...], str]:
    """Return the first fields that writes to a scratch cache confirm, or none and the reason."""
    s, backend, kv_dtype = strides_of(tensor, spec, num_blocks), _backend(layer), _kv_dtype(layer, spec)
    # Adapters often fail for the same reason. A dict keeps their order.
    reasons = dict[str, None]()
    types = element_types(kv_dtype, tensor.dtype)
    for adapter in ADAPTERS.get(backend, ()):
        written = adapter(s, shard)
        for element in types if written else ():
            why = probe.find_mismatch(layer, tensor, s, written, element)
            if not why:
                fields = fields_of(written)
                if element is not types[0]:
                    # The backend stores another type than the KV cache dtype names. With the type in their
                    # names, the fields match only fields of the same type in other engines.
                    kind = str(element).removeprefix("torch.")
                    fields = tuple(replace(field, name=f"{field.name} in {kind}") for field in fields)
                return fields, ""
            reasons[why] = None
    field = cells.cell_field(s, shard, f"{kv_dtype} of {backend}")
    if field is not None:
        why = cells.find_mismatch(layer, tensor, s, field)
        if not why:
            return (field,), ""
        reasons[why] = None
    return (), next(iter(reasons), "no content adapter fits them")
