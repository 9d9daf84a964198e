"""The contiguous pieces of a rank's memory that hold a few blocks of a group.

In most layouts a page is one strip. It is several in layouts with heads outside of blocks or layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.geometry import Group, PageFormat, RankGeometry
from kvferry.geometry.page import join_loops, loop_offsets
from kvferry.planning.descriptors import Int64s, merge


@dataclass(frozen=True, slots=True)
class Strip:
    """A contiguous piece of memory with bytes of one layer, by index in its group and name, and one block."""

    address: int
    length: int
    layer: int
    block: int
    name: str

    @property
    def stop(self) -> int:
        return self.address + self.length


def strips(group: Group, layers: Sequence[int], blocks: int) -> list[Strip]:
    """Return the strips of blocks 0 to ``blocks - 1`` in some layers of a group, sorted by address."""
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
    """Return (offsets, lengths) in bytes of the contiguous pieces of a page, ascending, int64."""
    starts, lengths = [], []
    for field in page.fields:
        run, outer = join_loops(field.item_bytes, (loop for axis in field.axes for loop in axis.loops))
        starts.append(loop_offsets(field.offset, outer))
        lengths.append(np.full(len(starts[-1]), run, np.int64))
    start, length = np.concatenate(starts), np.concatenate(lengths)
    order = np.argsort(start)
    # Fields such as K and V may be adjacent.
    found = merge(start[order], start[order], length[order])
    return found.src, found.length
