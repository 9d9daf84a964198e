"""Content adapters: what the bytes of a page mean for one attention backend.

Where pages lie is read from tensors; what is in them cannot be. On CPU vLLM hands over ``(blocks, heads,
tokens, 2·D)`` and keeps, per head, K transposed (``[D][tokens]``) and then V (``[tokens][D]``). So each
backend has an adapter that names fields, axes and strides, and an adapter is *proved* before it is
believed: known values are written through the backend's own cache-write operation into scratch pages of
    the same strides, and every element must be found where the adapter says. What is not proved moves as
    opaque whole pages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from kvferry.engines.vllm import compat
from kvferry.errors import ConfigError
from kvferry.geometry import Axis, Field, PageFormat, opaque_page

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shard:
    """Which KV heads this rank has.

    Attributes:
        rank, ranks: which of how many tensor-parallel ranks.
        start, total: first head held and heads in all; no total if it is not certain which heads it has.
    """

    rank: int
    ranks: int
    start: int
    total: int


@dataclass(frozen=True, slots=True)
class Strides:
    """How one layer's tensor lies, in bytes.

    Attributes:
        item: bytes of an element.
        heads, tokens, content: extent of a kernel block: heads, tokens, elements per head and token.
        kernel_blocks: kernel blocks per manager block.
        kernel, head, token: strides.
        k, v: elements of K and of V per head and token.
    """

    item: int
    heads: int
    tokens: int
    content: int
    kernel_blocks: int
    kernel: int
    head: int
    token: int
    k: int
    v: int


def strides_of(tensor: torch.Tensor, spec: Any, num_blocks: int) -> Strides:
    """Read them off a tensor of shape (kernel blocks, heads, tokens, content)."""
    item = tensor.element_size()
    ratio = tensor.shape[0] // num_blocks
    block, head, token, _ = (stride * item for stride in tensor.stride())
    heads, tokens, content = tensor.shape[1:]
    k, v = spec.head_size, spec.head_size_v
    return Strides(item, heads, tokens, content, ratio, block, head, token, k, v)


Adapter = Callable[[Strides, Shard], tuple[Field, ...]]


def packed_kv(s: Strides, shard: Shard) -> tuple[Field, ...]:
    """K then V per head and token: GPU backends."""
    heads = Axis("head", ((s.heads, s.head),), shard.start, shard.total)
    tokens = Axis("token", ((s.kernel_blocks, s.kernel), (s.tokens, s.token)))
    return (
        Field("k", s.item, 0, (heads, tokens, Axis("content", ((s.k, s.item),)))),
        Field("v", s.item, s.k * s.item, (heads, tokens, Axis("content", ((s.v, s.item),)))),
    )


def cpu_kv(s: Strides, shard: Shard) -> tuple[Field, ...]:
    """Per head a K plane ``[D][tokens]``, then a V plane ``[tokens][D]``: CPU_ATTN, vector code."""
    heads = Axis("head", ((s.heads, s.head),), shard.start, shard.total)
    k_tokens = Axis("token", ((s.kernel_blocks, s.kernel), (s.tokens, s.item)))
    v_tokens = Axis("token", ((s.kernel_blocks, s.kernel), (s.tokens, s.v * s.item)))
    return (
        Field("k", s.item, 0, (heads, k_tokens, Axis("content", ((s.k, s.tokens * s.item),)))),
        Field("v", s.item, s.tokens * s.k * s.item, (heads, v_tokens, Axis("content", ((s.v, s.item),)))),
    )


def latent(s: Strides, shard: Shard) -> tuple[Field, ...]:
    """One latent vector per token, the same on every rank: MLA."""
    del shard
    tokens = Axis("token", ((s.kernel_blocks, s.kernel), (s.tokens, s.token)))
    return (Field("latent", s.item, 0, (tokens, Axis("content", ((s.content, s.item),)))),)


_ADAPTERS: dict[str, Adapter] = {
    "CPU_ATTN": cpu_kv,
    "CPU_MLA": latent,
    "FLASH_ATTN": packed_kv,
    "TRITON_ATTN": packed_kv,
    "FLASHINFER": packed_kv,
    "TRITON_MLA": latent,
    "FLASH_ATTN_MLA": latent,
    "FLASHMLA": latent,
    "CUTLASS_MLA": latent,
    "FLASHINFER_MLA": latent,
}


def page_of_attention(
    layer: Any, name: str, spec: Any, tensor: torch.Tensor, num_blocks: int, shard: Shard
) -> PageFormat:
    """What a page of an attention layer holds: its adapter's fields if they can be proved, else opaque bytes.

    Args:
        layer: the engine's attention layer: its backend and its cache-write operation.
        name: for messages.
        spec: the layer's KV cache spec.
        tensor: the layer's cache, (kernel blocks, heads, tokens, content).
        num_blocks: manager blocks in it.
        shard: which heads this rank holds.
    """
    strides = strides_of(tensor, spec, num_blocks)
    adapter = _ADAPTERS.get(layer.get_attn_backend().get_name())
    why = "it has no content adapter"
    if not shard.total:
        why = f"which of the model's KV heads rank {shard.rank} holds is not certain"
    elif spec.tokens_per_state != 1:
        why = f"a state stands for {spec.tokens_per_state} tokens"
    elif adapter is not None and strides.content == strides.k + strides.v:
        fields = adapter(strides, shard)
        reach = max(field.extent()[1] for field in fields)
        page = PageFormat(content_id(layer, spec, tensor), spec.block_size, reach, fields)
        why = _disproof(layer, tensor, page, strides)
        if not why:
            return page
    elif adapter is not None:
        why = f"{strides.content} elements per head and token are not K and V of {strides.k} + {strides.v}"
    return whole_page(layer, name, spec, tensor, num_blocks, shard, spec.block_size, why)


def content_id(layer: Any, spec: Any, tensor: torch.Tensor) -> str:
    """What decides the meaning of a layer's bytes; a layer that only holds a cache (indexer) says less."""
    kept_as = getattr(layer, "kv_cache_dtype", None) or getattr(spec, "cache_dtype_str", None) or "auto"
    backend = layer.get_attn_backend().get_name()
    return ":".join([backend, str(getattr(layer, "isa", "")), str(tensor.dtype), str(kept_as)])


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
    """A page that moves as it is, between equal blocks, and ranks unless all of them hold the same.

    Args:
        layer, name, spec, tensor, num_blocks, shard: as of `page_of_attention`.
        block_tokens: tokens of a block, 0 for a snapshot.
        why: its content is not known.
    """
    content = content_id(layer, spec, tensor)
    logger.warning(
        "layer %s: content of %s pages is not known (%s): they move whole, between equal blocks and ranks",
        name, content, why,
    )  # fmt: skip
    ranks = 1 if compat.is_replicated(spec) else shard.ranks
    return opaque_page(
        f"{content} {tuple(tensor.shape[1:])}", block_tokens, _dense_bytes(tensor, num_blocks),
        shard.rank if ranks > 1 else 0, ranks,
    )  # fmt: skip


def _dense_bytes(tensor: torch.Tensor, num_blocks: int) -> int:
    """Bytes of a manager block's page, which must be one stretch of memory."""
    ratio = tensor.shape[0] // num_blocks
    shape = (ratio, *tensor.shape[1:])
    reach = sum((n - 1) * s for n, s in zip(shape, tensor.stride(), strict=True)) + 1
    if reach != prod(shape):
        raise ConfigError(
            f"pages of shape {shape} lie scattered and their content is not known, so they cannot move "
            "whole; choose a layout that keeps a page together (VLLM_KV_CACHE_LAYOUT=LBHNC)"
        )
    return int(reach * tensor.element_size())


# -- proof ------------------------------------------------------------------------------------------------


def _disproof(layer: Any, tensor: torch.Tensor, page: PageFormat, s: Strides) -> str:
    """Why the adapter is wrong about this backend; empty if every element is where it says."""
    try:
        for axis in ("token", "head", "content"):
            for digit in range(_digits(page, axis)):
                if not _found(layer, tensor, page, s, axis, digit):
                    return f"the {axis} axis is not where its adapter says"
    except Exception as error:  # noqa: BLE001 - a backend that cannot be probed is a backend that is not proved
        return f"its cache-write operation could not be run: {error}"
    return ""


_RADIX = 16
"""Coordinates are written digit by digit, small enough to be exact in every KV dtype, fp8 included."""


def _digits(page: PageFormat, axis: str) -> int:
    longest = max((a.count for f in page.fields for a in f.axes if a.name == axis), default=1)
    return max(1, len(np.base_repr(longest - 1, _RADIX)))


def _found(layer: Any, tensor: torch.Tensor, page: PageFormat, s: Strides, axis: str, digit: int) -> bool:
    """Write one coordinate's digit into every element of block 1 of a scratch cache, and look for it."""
    total = s.kernel_blocks * s.tokens
    scratch = _scratch(tensor, s)
    values = {
        name: _coordinate((total, s.heads, width), axis, digit, offset, tensor)
        for name, width, offset in (("k", s.k, 0), ("v", s.v, 8))
        if width
    }
    slots = torch.arange(total, 2 * total, dtype=torch.int64, device=tensor.device)
    _write(layer, scratch, values, slots)
    raw = scratch.untyped_storage()
    memory = torch.tensor([], dtype=tensor.dtype, device=tensor.device).set_(raw).float().cpu().numpy()
    start = s.kernel_blocks * s.kernel // s.item
    for field in page.fields:
        order = [field.axis(name) for name in ("token", "head", "content")]
        offsets = np.array([field.offset], np.int64)
        for part in order:
            if part is not None:
                offsets = (offsets[:, None] + part.offsets()).reshape(-1)
        expected = values["k" if field.name == "latent" else field.name].float().cpu().numpy().reshape(-1)
        if not np.array_equal(memory[start + offsets // s.item], expected):
            return False
    return True


def _coordinate(
    shape: tuple[int, int, int], axis: str, digit: int, offset: int, like: torch.Tensor
) -> torch.Tensor:
    """A tensor (tokens, heads, content) whose elements say where along `axis` they are: one digit of it."""
    dim = ("token", "head", "content").index(axis)
    along = (torch.arange(shape[dim]) // _RADIX**digit + offset) % _RADIX
    view = [1, 1, 1]
    view[dim] = shape[dim]
    dtype = like.dtype if like.dtype.itemsize > 1 else torch.bfloat16
    return along.view(view).expand(shape).to(dtype).contiguous().to(like.device)


def _scratch(tensor: torch.Tensor, s: Strides) -> torch.Tensor:
    """Two manager blocks of zeros with the strides of `tensor`."""
    shape = (2 * s.kernel_blocks, *tensor.shape[1:])
    size = sum((n - 1) * st for n, st in zip(shape, tensor.stride(), strict=True)) + 1
    return torch.zeros(size, dtype=tensor.dtype, device=tensor.device).as_strided(shape, tensor.stride())


def _write(layer: Any, cache: torch.Tensor, values: dict[str, torch.Tensor], slots: torch.Tensor) -> None:
    """The backend's own cache-write operation."""
    if "v" in values:
        layer.impl.do_kv_cache_update(layer, values["k"], values["v"], cache, slots)
        return
    latents = values["k"][:, 0]
    rope = layer.qk_rope_head_dim
    layer.impl.do_kv_cache_update(
        latents[:, :-rope].contiguous(), latents[:, None, -rope:].contiguous(), cache.squeeze(1), slots,
        layer.kv_cache_dtype, torch.ones(1, dtype=torch.float32, device=cache.device),
    )  # fmt: skip
