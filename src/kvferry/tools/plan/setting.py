"""Two hypothetical engines with their memory at made-up addresses, and a request between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvferry.geometry import GroupKind, GroupPattern, RankGeometry
from kvferry.planning import Cells, Int64s, LoadSpan, Route, Template, build_templates, select_cells
from kvferry.tools.models import ModelReading, per_layer
from kvferry.tools.models.store import LayerCache
from kvferry.tools.plan.contents import lay_out_engine
from kvferry.tools.plan.side import EngineSide, shape


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """The memory of one hypothetical engine at made-up addresses, with a request in it."""

    ranks: tuple[RankGeometry, ...]
    kinds: tuple[int, ...]  # index in `PlannedTransfer.kinds` for each KV cache group
    # Block ids of each group in the order of the request's tokens, int64 of shape (blocks,). A group of
    # recurrent state has one block. No two blocks are adjacent.
    tables: tuple[Int64s, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTransfer:
    """Two hypothetical engines, and a request between them. `kinds` are the distinct `LayerCache`."""

    kinds: tuple[LayerCache, ...]
    src: EngineMemory
    dst: EngineMemory
    span: LoadSpan

    def templates(self, number: int) -> tuple[Template, ...]:
        return build_templates(self.src.ranks, self.dst.ranks[number])

    def cells(self, route: Route, group: GroupPattern) -> Cells:
        """Return the cells that the request transfers, if the route's layers have this attention."""
        src, dst = self.src.tables[route.src_group], self.dst.tables[route.dst_group]
        return select_cells(route, group, self.span, src, dst)


def set_up(
    reading: ModelReading, sides: tuple[EngineSide, EngineSide], tokens: int, *, separate: bool = False
) -> PlannedTransfer:
    """Lay out the memory of two hypothetical engines, and make up the block tables of a request in both.

    K and V are on `separate` pages in both engines, or a page holds both.
    """
    laid, origin = split_k_and_v(reading) if separate else (reading, {s: s for s in reading.cache.layers})
    kinds = tuple(dict.fromkeys(reading.cache.layers))
    src, dst = (
        _memory(laid, side, tokens, [kinds.index(origin[s]) for s in laid.cache.layers]) for side in sides
    )
    # The destination has no cached tokens, and computes the last token of the prompt itself.
    return PlannedTransfer(kinds=kinds, src=src, dst=dst, span=LoadSpan(0, tokens - 1, tokens))


def _memory(reading: ModelReading, side: EngineSide, tokens: int, kinds: Sequence[int]) -> EngineMemory:
    groups = shape(reading, side, num_blocks=1).groups
    layers = reading.cache.layers
    blocks = [
        1 if layers[group.layers[0]].kind is GroupKind.STATE else -(-tokens // group.block_tokens)
        for group in groups
    ]
    # Block 0 is the null block.
    ids = np.arange(1, 1 + 2 * sum(blocks), 2, dtype=np.int64)
    return EngineMemory(
        ranks=lay_out_engine(reading, side, 1 + 2 * len(ids)),
        kinds=tuple(kinds[group.layers[0]] for group in groups),
        tables=tuple(np.split(ids, np.cumsum(blocks)[:-1])),
    )


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
