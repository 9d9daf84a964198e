"""The contiguous pieces of a rank's memory that hold a few blocks of a group.

A *strip* is a contiguous piece of memory with bytes of one layer and one block. In most layouts a page is one
strip. It is several strips in layouts with heads outside of blocks or layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.geometry import Group, PageFormat, RankGeometry
from kvferry.planning.descriptors import Int64s


@dataclass(frozen=True, slots=True)
class Strip:
    """A contiguous piece of memory with bytes of one layer and one block.

    Attributes:
        address: address of the first byte.
        length: length in bytes.
        layer: index of the layer in its KV cache group.
        block: id of the block.
        name: name of the layer.
    """

    address: int
    length: int
    layer: int
    block: int
    name: str

    @property
    def stop(self) -> int:
        """Address of the first byte after this piece of memory."""
        return self.address + self.length


def strips(group: Group, layers: Sequence[int], blocks: int) -> list[Strip]:
    """Return the strips (contiguous pieces of memory) of the first blocks in some layers, sorted by address.

    Args:
        group: KV cache group on one rank.
        layers: indices of the layers in the group.
        blocks: number of blocks. The blocks are 0 to ``blocks - 1``.
    """
    found = []
    for number in layers:
        layer = group.layers[number]
        starts, lengths = _stretches(layer.page)
        for block in range(blocks):
            base = layer.address + block * layer.block_stride
            found += [
                Strip(base + start, length, number, block, layer.name)
                for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
            ]
    return sorted(found, key=lambda strip: strip.address)


def rank_label(rank: RankGeometry) -> str:
    """Return a short name of a rank, such as ``TP rank 0 of 2``."""
    stage = f"PP rank {rank.pp_rank} of {rank.pp_size}, " if rank.pp_size > 1 else ""
    return f"{stage}TP rank {rank.tp_rank} of {rank.tp_size}"


def _stretches(page: PageFormat) -> tuple[Int64s, Int64s]:
    """Return the contiguous pieces of memory of a page (one block in one layer), in ascending order.

    Returns:
        (byte offset of each piece in the page, length of each piece in bytes), both int64 of shape (pieces,).
    """
    starts, lengths = [], []
    for field in page.fields:
        offsets = np.array([field.offset], np.int64)
        run = field.item_bytes
        loops = sorted((stride, count) for axis in field.axes for count, stride in axis.loops if count > 1)
        for stride, count in loops:
            if stride == run and len(offsets) == 1:
                run *= count
            else:
                steps = np.arange(count, dtype=np.int64) * stride
                offsets = (offsets[:, None] + steps).reshape(-1)
        starts.append(offsets)
        lengths.append(np.full(len(offsets), run, np.int64))
    start, length = np.concatenate(starts), np.concatenate(lengths)
    order = np.argsort(start)
    start, length = start[order], length[order]
    breaks = np.flatnonzero(start[1:] != start[:-1] + length[:-1]) + 1
    first = np.concatenate([[0], breaks])
    return start[first], np.add.reduceat(length, first)
