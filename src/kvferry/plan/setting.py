"""Two hypothetical engines and a request between them, at hypothetical addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvferry.geometry import GroupKind, RankGeometry
from kvferry.geometry.layout import lay_out
from kvferry.geometry.models import ModelReading, per_layer
from kvferry.geometry.store import LayerCache
from kvferry.plan.side import EngineSide, shape
from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import Cells, LoadSpan, select_cells
from kvferry.planning.template import Route, Template, build_templates


def apart(reading: ModelReading) -> tuple[ModelReading, dict[LayerCache, LayerCache]]:
    """Replace every layer that has both K and V by a layer for K and a layer for V.

    Returns:
        The new model, and for each kind of its layers the kind in `reading` that it is part of. Engines laid
        K and V out like this before they packed both per head and token.
    """
    origin: dict[LayerCache, LayerCache] = {}
    parts: dict[LayerCache, tuple[LayerCache, ...]] = {}
    for store in dict.fromkeys(reading.cache.layers):
        names = dict.fromkeys(field.name.partition(".")[0] for field in store.fields)
        planes = [tuple(f for f in store.fields if f.name.partition(".")[0] == name) for name in names]
        parts[store] = (
            tuple(replace(store, fields=p) for p in planes) if set(names) == {"k", "v"} else (store,)
        )
        origin |= dict.fromkeys(parts[store], store)
    made = [[part for store in stores for part in parts[store]] for stores in per_layer(reading)]
    cache = replace(reading.cache, layers=tuple(part for layer in made for part in layer))
    return replace(reading, cache=cache, kept=tuple(map(len, made))), origin


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTransfer:
    """Two engines and a request, at hypothetical addresses.

    Attributes:
        kinds: the caches that layers have, each kind once.
        src_rows, dst_rows: index in `kinds` of each group of source and destination.
        srcs, dsts: ranks of source and destination.
        src_tables, dst_tables: block tables of source and destination.
        span: tokens that move.
    """

    kinds: tuple[LayerCache, ...]
    src_rows: tuple[int, ...]
    dst_rows: tuple[int, ...]
    srcs: tuple[RankGeometry, ...]
    dsts: tuple[RankGeometry, ...]
    src_tables: Tables
    dst_tables: Tables
    span: LoadSpan

    def templates(self, number: int) -> tuple[Template, ...]:
        """Return the templates by which one destination rank reads from every source rank.

        Raises:
            Incompatible: the two cannot exchange this model's cache.
        """
        return build_templates(self.srcs, self.dsts[number])

    def cells(self, route: Route, kind: GroupKind, attention_span: int) -> Cells:
        """Return the cells of a route that move if its group is of this kind and span."""
        src, dst = self.src_tables.by_group[route.src_group], self.dst_tables.by_group[route.dst_group]
        return select_cells(
            route, kind, attention_span=attention_span, span=self.span, src_table=src, dst_table=dst
        )


def set_up(
    reading: ModelReading, sides: tuple[EngineSide, EngineSide], tokens: int, *, separate: bool = False
) -> PlannedTransfer:
    """Lay out both engines, and the request on them.

    Args:
        reading: the model.
        sides: source and destination.
        tokens: length of the prompt.
        separate: True for K and V as separate pages on both sides.

    Raises:
        KVFerryError: an engine cannot have these settings.
    """
    laid, origin = apart(reading) if separate else (reading, {s: s for s in reading.cache.layers})
    kinds = tuple(dict.fromkeys(reading.cache.layers))
    row_of = {number: kinds.index(origin[store]) for number, store in enumerate(laid.cache.layers)}
    src_tables, dst_tables = (tables(laid, side, tokens) for side in sides)
    shapes = [
        shape(laid, side, t.num_blocks) for side, t in zip(sides, (src_tables, dst_tables), strict=True)
    ]
    rows = [tuple(row_of[group.layers[0]] for group in each.groups) for each in shapes]
    srcs, dsts = (lay_out(laid.cache, each) for each in shapes)
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
