"""Two hypothetical engines and a request between them, at hypothetical addresses."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.geometry import GroupKind, RankGeometry
from kvferry.geometry.layout import lay_out
from kvferry.geometry.models import ModelReading
from kvferry.geometry.store import LayerCache
from kvferry.plan.planes import apart
from kvferry.plan.request import Tables, span_of, tables
from kvferry.plan.side import EngineSide, shape
from kvferry.planning.select import Cells, LoadSpan, select_cells
from kvferry.planning.template import Route, Template, build_templates


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTransfer:
    """Two engines and a request, at hypothetical addresses.

    Attributes:
        kinds: the caches that layers have, each kind once.
        src_rows, dst_rows: index in `kinds` of each group of source and destination.
        srcs, dsts: ranks of source and destination.
        here, there: block tables of source and destination.
        span: tokens that move.
    """

    kinds: tuple[LayerCache, ...]
    src_rows: tuple[int, ...]
    dst_rows: tuple[int, ...]
    srcs: tuple[RankGeometry, ...]
    dsts: tuple[RankGeometry, ...]
    here: Tables
    there: Tables
    span: LoadSpan

    def templates(self, number: int) -> tuple[Template, ...]:
        """Return the templates by which one destination rank reads from every source rank.

        Raises:
            Incompatible: the two cannot exchange this model's cache.
        """
        return build_templates(self.srcs, self.dsts[number])

    def cells(self, route: Route, kind: GroupKind, attention_span: int) -> Cells:
        """Return the cells of a route that move if its group is of this kind and span."""
        src, dst = self.here.by_group[route.src_group], self.there.by_group[route.dst_group]
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
    here, there = (tables(laid, side, tokens) for side in sides)
    shapes = [shape(laid, side, t.num_blocks) for side, t in zip(sides, (here, there), strict=True)]
    rows = [tuple(row_of[group.layers[0]] for group in each.groups) for each in shapes]
    srcs, dsts = (lay_out(laid.cache, each) for each in shapes)
    return PlannedTransfer(
        kinds=kinds,
        src_rows=rows[0],
        dst_rows=rows[1],
        srcs=srcs,
        dsts=dsts,
        here=here,
        there=there,
        span=span_of(tokens),
    )
