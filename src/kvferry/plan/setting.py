"""Two hypothetical engines with their memory at made-up addresses, and a request between them."""

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
    """Replace every layer that caches K and V by one layer for K and one for V.

    Engines laid out K and V like this before they packed both per head and token.

    Returns:
        (new model, origin). The origin maps each kind of layer in the new model to the kind in `reading` from
        which it comes.
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
"""Distance between block ids. Tables use every other block of the pool, so no two blocks are adjacent."""


def span_of(tokens: int) -> LoadSpan:
    """Return the span that a handover transfers: all tokens of a prompt except the last one.

    The destination has no cached tokens, and it computes the last prompt token itself.

    Args:
        tokens: length of the prompt in tokens.
    """
    return LoadSpan(0, tokens - 1, tokens)


@dataclass(frozen=True, slots=True)
class Tables:
    """The block tables of the request on one side.

    Attributes:
        by_group: block ids by position for each group, int64 of shape (blocks,). A state group has one block,
            which holds the snapshot.
        num_blocks: number of blocks in the pool.
    """

    by_group: tuple[Int64s, ...]
    num_blocks: int


def tables(reading: ModelReading, side: EngineSide, tokens: int) -> Tables:
    """Return the block tables of all groups on one side. No table contains the null block or a shared block.

    Args:
        reading: caches of the model's layers.
        side: settings of the engine on this side.
        tokens: length of the prompt in tokens.
    """
    layers = reading.cache.layers
    return scattered(
        [
            1 if layers[group.layers[0]].kind is GroupKind.STATE else -(-tokens // group.block_tokens)
            for group in shape(reading, side, 1).groups
        ]
    )


def scattered(blocks: Sequence[int]) -> Tables:
    """Return block tables with the given numbers of blocks. No two blocks are adjacent.

    >>> [table.tolist() for table in scattered([2, 1]).by_group], scattered([2, 1]).num_blocks
    ([[1, 3], [5]], 7)
    """
    ids = 1 + _STEP * np.arange(sum(blocks), dtype=np.int64)
    cuts = np.cumsum(blocks)[:-1]
    return Tables(tuple(np.split(ids, cuts)), 1 + _STEP * len(ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTransfer:
    """Two engines and a request between them, at made-up addresses.

    Attributes:
        kinds: distinct caches of the model's layers.
        src_rows, dst_rows: index in `kinds` of each group of the source and of the destination.
        srcs, dsts: geometry of all ranks of the source and of the destination.
        src_tables, dst_tables: block tables of the request at the source and at the destination.
        span: tokens that are transferred.
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

        Args:
            number: index of the destination rank.

        Raises:
            Incompatible: the two engines cannot exchange this model's cache.
        """
        return build_templates(self.srcs, self.dsts[number])

    def cells(self, route: Route, kind: GroupKind, attention_span: int) -> Cells:
        """Return the cells of a route that the request transfers.

        Args:
            route: route of a template.
            kind, attention_span: assumed kind and attention span of the route's destination group.
        """
        src, dst = self.src_tables.by_group[route.src_group], self.dst_tables.by_group[route.dst_group]
        return select_cells(
            route, kind, attention_span=attention_span, span=self.span, src_table=src, dst_table=dst
        )


def set_up(
    reading: ModelReading, sides: tuple[EngineSide, EngineSide], tokens: int, *, separate: bool = False
) -> PlannedTransfer:
    """Lay out the memory of both engines, and allocate blocks for the request on both sides.

    Args:
        reading: caches of the model's layers.
        sides: settings of the source and of the destination.
        tokens: length of the prompt in tokens.
        separate: True if K and V are separate pages on both sides, False if a page holds both.

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
