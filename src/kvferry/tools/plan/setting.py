"""Two hypothetical engines with their memory at made-up addresses, and a request between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvferry.geometry import GroupKind, GroupPattern, RankGeometry
from kvferry.geometry.models import ModelReading, per_layer
from kvferry.geometry.store import LayerCache
from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import Cells, LoadSpan, select_cells
from kvferry.planning.template import Route, Template, build_templates
from kvferry.tools.plan.contents import lay_out_engine
from kvferry.tools.plan.side import EngineSide, shape


def split_k_and_v(reading: ModelReading) -> tuple[ModelReading, dict[LayerCache, LayerCache]]:
    """Return a description of the model in which K and V of each layer are two separate layers.

    This describes engines that store K and V on separate pages. Layers with other fields stay as they are.

    Returns:
        (new description, kind of layer in `reading` by each kind made from it).
    """
    origin: dict[LayerCache, LayerCache] = {}
    parts: dict[LayerCache, tuple[LayerCache, ...]] = {}
    for cache in dict.fromkeys(reading.cache.layers):
        names = dict.fromkeys(field.name.partition(".")[0] for field in cache.fields)
        planes = [tuple(f for f in cache.fields if f.name.partition(".")[0] == name) for name in names]
        parts[cache] = (
            tuple(replace(cache, fields=p) for p in planes) if set(names) == {"k", "v"} else (cache,)
        )
        origin |= dict.fromkeys(parts[cache], cache)
    made = [[part for cache in caches for part in parts[cache]] for caches in per_layer(reading)]
    model_cache = replace(reading.cache, layers=tuple(part for layer in made for part in layer))
    return replace(reading, cache=model_cache, kept=tuple(map(len, made))), origin


# Tables use every other block of the pool, so no two blocks are adjacent.
_STEP = 2


def span_of(tokens: int) -> LoadSpan:
    """Return the range of tokens that a handover transfers: all tokens of a prompt except the last token."""
    # The destination has no cached tokens, and computes the last token of the prompt itself.
    return LoadSpan(0, tokens - 1, tokens)


@dataclass(frozen=True, slots=True)
class RequestTables:
    """The block tables of a request in one engine.

    Attributes:
        by_group: block ids of each group in the order of the tokens, int64 of shape (blocks,). A group of
            recurrent state has one block.
        num_blocks: number of blocks in the engine's pool.
    """

    by_group: tuple[Int64s, ...]
    num_blocks: int


def make_tables(reading: ModelReading, side: EngineSide, tokens: int) -> RequestTables:
    """Make up block tables for a request in one engine, without common blocks and null blocks."""
    layers = reading.cache.layers
    return scattered_tables(
        [
            1 if layers[group.layers[0]].kind is GroupKind.STATE else -(-tokens // group.block_tokens)
            for group in shape(reading, side, 1).groups
        ]
    )


def scattered_tables(blocks: Sequence[int]) -> RequestTables:
    """Make up block tables with the given numbers of blocks, no two of them adjacent in memory.

    >>> [table.tolist() for table in scattered_tables([2, 1]).by_group], scattered_tables([2, 1]).num_blocks
    ([[1, 3], [5]], 7)
    """
    # Block 0 is the null block.
    ids = 1 + _STEP * np.arange(sum(blocks), dtype=np.int64)
    cuts = np.cumsum(blocks)[:-1]
    return RequestTables(tuple(np.split(ids, cuts)), 1 + _STEP * len(ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTransfer:
    """Two hypothetical engines with memory at made-up addresses, and a request to transfer between them.

    Attributes:
        kinds: KV cache of each kind of layer: layers with equal `LayerCache`.
        src_rows, dst_rows: index in `kinds` for each KV cache group of the source and of the destination.
        srcs, dsts: memory geometry of all ranks of the source and of the destination.
        span: range of the prompt's tokens to transfer.
    """

    kinds: tuple[LayerCache, ...]
    src_rows: tuple[int, ...]
    dst_rows: tuple[int, ...]
    srcs: tuple[RankGeometry, ...]
    dsts: tuple[RankGeometry, ...]
    src_tables: RequestTables
    dst_tables: RequestTables
    span: LoadSpan

    def templates(self, number: int) -> tuple[Template, ...]:
        """Return the templates by which one destination rank reads from the source ranks.

        Raises:
            Incompatible: the two engines cannot exchange this model's KV.
        """
        return build_templates(self.srcs, self.dsts[number])

    def cells(self, route: Route, group: GroupPattern) -> Cells:
        """Return the cells that the request transfers, if the route's layers have this attention."""
        src, dst = self.src_tables.by_group[route.src_group], self.dst_tables.by_group[route.dst_group]
        return select_cells(route, group, self.span, src, dst)


def set_up(
    reading: ModelReading, sides: tuple[EngineSide, EngineSide], tokens: int, *, separate: bool = False
) -> PlannedTransfer:
    """Lay out the memory of two hypothetical engines, and make up the block tables of a request in both.

    Args:
        separate: True if K and V are on separate pages in both engines, False if a page holds both.

    Raises:
        KVFerryError: an engine cannot have these settings.
    """
    laid, origin = split_k_and_v(reading) if separate else (reading, {s: s for s in reading.cache.layers})
    kinds = tuple(dict.fromkeys(reading.cache.layers))
    row_of = {number: kinds.index(origin[cache]) for number, cache in enumerate(laid.cache.layers)}
    src_tables, dst_tables = (make_tables(laid, side, tokens) for side in sides)
    shapes = [
        shape(laid, side, t.num_blocks) for side, t in zip(sides, (src_tables, dst_tables), strict=True)
    ]
    rows = [tuple(row_of[group.layers[0]] for group in each.groups) for each in shapes]
    srcs, dsts = (
        lay_out_engine(laid, side, tables.num_blocks)
        for side, tables in zip(sides, (src_tables, dst_tables), strict=True)
    )
    return PlannedTransfer(
        kinds=kinds,
        src_rows=rows[0],
        dst_rows=rows[1],
        srcs=srcs,
        dsts=dsts,
        src_tables=src_tables,
        dst_tables=dst_tables,
        span=span_of(tokens),
    )
