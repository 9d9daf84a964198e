"""The bytes in an engine's own cache, by what they mean: layer, field, token; wherever they lie."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from kvferry.geometry import Field, GroupKind, Layer
from kvferry.geometry.page import TOKEN
from kvferry.planning.select import LoadSpan, blocks_needed, needed_tokens

Digests = dict[str, list[str]]
"""``layer/field/head`` to a digest per token, or per block where a field has no tokens; what has no
heads is head 0."""


def digests_of(worker: Any, tables: Any, span: LoadSpan) -> Digests:
    """Digests of all that a continuation over `span` needs: equal for equal content in whatever layout.

    With context parallelism, those of the tokens that this rank holds.
    """
    result = {}
    for group, table in zip(worker.geometry.groups, tables, strict=True):
        ids = blocks_needed(group, span, np.array(table, np.int64))
        low, high = needed_tokens(group, span)
        at = 0 if group.kind is GroupKind.STATE else low // group.block_tokens * group.block_tokens
        for layer in group.layers:
            for head, field in (each for whole in layer.page.fields for each in _by_head(whole)):
                rows = [row for block in ids for row in _content(worker, layer, field, int(block))]
                if field.axis(TOKEN) is not None:
                    tokens = at + layer.page.interleave.held(len(rows))
                    rows = [row for row, token in zip(rows, tokens, strict=True) if low <= token < high]
                result[f"{layer.identity}/{field.name}/{head}"] = [_digest(row) for row in rows]
    return result


def _by_head(field: Field) -> Iterator[tuple[int, Field]]:
    """Each head of a field under its number in the whole model."""
    heads = field.axis("head")
    if heads is None:
        yield 0, field
        return
    others = tuple(axis for axis in field.axes if axis is not heads)
    for head, offset in enumerate(heads.offsets().tolist(), heads.start):
        yield head, replace(field, offset=field.offset + offset, axes=others)


def kernel_tokens(worker: Any) -> set[int]:
    """Tokens in the blocks that attention kernels address, of which vLLM's may be made."""
    groups = [group for group in worker.geometry.groups if group.kind is not GroupKind.STATE]
    return {worker.caches[layer.name].shape[2] for group in groups for layer in group.layers}


def negate(worker: Any, layer: Layer, block: int) -> None:
    """Flip the sign of every element of a page; where elements are unknown, of every second byte."""
    page = _page(worker, layer, block)
    for field in layer.page.fields:
        item = 2 if field.name.startswith("opaque") else field.item_bytes
        last_bytes = np.arange(item - 1, field.item_bytes, item)
        page[(_offsets(field)[:, :, None] + last_bytes).reshape(-1)] ^= 0x80


def poison(worker: Any, value: float) -> None:
    """Fill every block but the null block of every attention layer."""
    for cache in worker.caches.values():
        if cache.is_floating_point():
            cache[cache.shape[0] // worker.geometry.num_blocks :] = value


def _page(worker: Any, layer: Layer, block: int) -> np.ndarray:
    """The bytes from the first to the last of a page, writable; other layers' may lie between."""
    cache = worker.caches[layer.name]
    ratio = cache.shape[0] // worker.geometry.num_blocks
    address = cache.data_ptr() + block * ratio * cache.stride(0) * cache.element_size()
    return np.ctypeslib.as_array((ctypes.c_uint8 * layer.page.page_bytes).from_address(address))


def _content(worker: Any, layer: Layer, field: Field, block: int) -> np.ndarray:
    """The bytes of a field in one block, (tokens or 1, bytes), in an order that no layout changes."""
    where = _offsets(field)[:, :, None] + np.arange(field.item_bytes)
    return _page(worker, layer, block)[where.reshape(len(where), -1)]


def _offsets(field: Field) -> np.ndarray:
    """Byte offsets of a field's elements, (tokens or 1, others by axis name)."""
    token = field.axis(TOKEN)
    others = np.zeros(1, np.int64)
    for axis in sorted(field.axes, key=lambda axis: axis.name):
        if axis is not token:
            others = (others[:, None] + axis.offsets()).reshape(-1)
    tokens = np.zeros(1, np.int64) if token is None else token.offsets()
    return field.offset + tokens[:, None] + others


def _digest(row: np.ndarray) -> str:
    return hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest()
