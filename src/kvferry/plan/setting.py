"""Two hypothetical engines with their memory at made-up addresses, and a request between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvferry.geometry import GroupKind, RankGeometry
from kvferry.geometry.models import ModelReading, per_layer
from kvferry.geometry.store import LayerCache
from kvferry.plan.engine_memory import lay_out_engine
from kvferry.plan.side import EngineSide, shape
from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import Cells, LoadSpan, select_cells
from kvferry.planning.template import Route, Template, build_templates


def split_k_and_v(reading: ModelReading) -> tuple[ModelReading, dict[LayerCache, LayerCache]]:
    """Return a description of the model in which K and V of each layer are two separate layers.

    This describes engines that store K and V on separate pages instead of side by side for each head and
    token. Layers with other fields than K and V stay as they are.

    Args:
        reading: description of the model's KV cache.

    Returns:
        (new description, origin). The origin maps each kind of layer in the new description to the kind of
        layer in `reading` from which it was made.
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


_STEP = 2
"""Distance between block ids. Tables use every other block of the pool, so no two blocks are adjacent."""


def span_of(tokens: int) -> LoadSpan:
    """Return the range of tokens that a handover transfers: all tokens of a prompt except the last token.

    The destination has no cached tokens. It computes the last token of the prompt itself.

    Args:
        tokens: length of the prompt in tokens.
    """
    return LoadSpan(0, tokens - 1, tokens)


@dataclass(frozen=True, slots=True)
class RequestTables:
    """The block tables of a request in one engine.

    Attributes:
        by_group: block table of each KV cache group: block ids in the order of the tokens, int64 of shape
            (blocks,). A group of recurrent state has one block, which holds the state.
        num_blocks: number of blocks in the engine's pool.
    """

    by_group: tuple[Int64s, ...]
    num_blocks: int


def make_tables(reading: ModelReading, side: EngineSide, tokens: int) -> RequestTables:
    """Make up block tables for a request in one engine.

    No block is in two tables, and no table contains the null block.

    Args:
        reading: description of the model's KV cache.
        side: settings of the engine.
        tokens: length of the request's prompt in tokens.
    """
    layers = reading.cache.layers
    return scattered_tables(
        [
            1 if layers[group.layers[0]].kind is GroupKind.STATE else -(-tokens // group.block_tokens)
            for group in shape(reading, side, 1).groups
        ]
    )


def scattered_tables(blocks: Sequence[int]) -> RequestTables:
    """Make up block tables with the given numbers of blocks.

    The block ids are 1, 3, 5 and so on, so that no two blocks are adjacent in memory.

    >>> [table.tolist() for table in scattered_tables([2, 1]).by_group], scattered_tables([2, 1]).num_blocks
    ([[1, 3], [5]], 7)

    Args:
        blocks: number of blocks in each table.
    """
    ids = 1 + _STEP * np.arange(sum(blocks), dtype=np.int64)
    cuts = np.cumsum(blocks)[:-1]
    return RequestTables(tuple(np.split(ids, cuts)), 1 + _STEP * len(ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTransfer:
    """Two hypothetical engines with memory at made-up addresses, and a request to transfer between them.

    Attributes:
        kinds: KV cache of each kind of layer. Layers are of the same kind if their `LayerCache` is equal.
        src_rows, dst_rows: index in `kinds` for each KV cache group of the source and of the destination.
        srcs, dsts: memory geometry of all ranks of the source and of the destination.
        src_tables, dst_tables: block tables of the request at the source and at the destination.
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

        A template is a precomputed set of copy operations from one source rank to one destination rank. A
        transfer only adds the block ids.

        Args:
            number: index of the destination rank.

        Returns:
            One template per source rank, in the order of `srcs`.

        Raises:
            Incompatible: the two engines cannot exchange this model's KV.
        """
        return build_templates(self.srcs, self.dsts[number])

    def cells(self, route: Route, kind: GroupKind, attention_span: int) -> Cells:
        """Return the cells (parts of blocks that are copied as one unit) that the request transfers.

        Args:
            route: layers that are copied together between two ranks.
            kind: kind to assume for these layers' cache. It may differ from the real kind, to compare windows
                with full attention.
            attention_span: attention span to assume for these layers, in tokens; 0 for all tokens.
        """
        src, dst = self.src_tables.by_group[route.src_group], self.dst_tables.by_group[route.dst_group]
        return select_cells(
            route, kind, attention_span=attention_span, span=self.span, src_table=src, dst_table=dst
        )


def set_up(
    reading: ModelReading, sides: tuple[EngineSide, EngineSide], tokens: int, *, separate: bool = False
) -> PlannedTransfer:
    """Lay out the memory of two hypothetical engines, and make up the block tables of a request in both.

    Args:
        reading: description of the model's KV cache.
        sides: settings of the source engine and of the destination engine.
        tokens: length of the request's prompt in tokens.
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
