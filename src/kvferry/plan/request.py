"""A hypothetical request, with blocks as scattered as on an engine that has run for a while."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.geometry import GroupKind
from kvferry.geometry.models import ModelReading
from kvferry.plan.side import EngineSide, shape
from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import LoadSpan

_STEP = 2
"""Distance of block ids: with every other block of the pool, no two blocks of a table are adjacent."""


def span_of(tokens: int) -> LoadSpan:
    """Return the span of a prompt without cached tokens. All tokens move but the last, which is computed."""
    return LoadSpan(0, tokens - 1, tokens)


@dataclass(frozen=True, slots=True)
class Tables:
    """The block tables of the request on one side.

    Attributes:
        by_group: block ids by position, for each group; for a state group the one block of the snapshot.
        num_blocks: number of blocks in the pool.
    """

    by_group: tuple[Int64s, ...]
    num_blocks: int


def tables(reading: ModelReading, side: EngineSide, tokens: int) -> Tables:
    """Return the block tables of all groups of one side. They share no block and have no null block."""
    layers = reading.cache.layers
    return scattered(
        [
            1 if layers[group.layers[0]].kind is GroupKind.STATE else -(-tokens // group.block_tokens)
            for group in shape(reading, side, 1).groups
        ]
    )


def scattered(blocks: Sequence[int]) -> Tables:
    """Return tables with the given numbers of blocks.

    >>> [table.tolist() for table in scattered([2, 1]).by_group], scattered([2, 1]).num_blocks
    ([[1, 3], [5]], 7)
    """
    ids = 1 + _STEP * np.arange(sum(blocks), dtype=np.int64)
    cuts = np.cumsum(blocks)[:-1]
    return Tables(tuple(np.split(ids, cuts)), 1 + _STEP * len(ids))
