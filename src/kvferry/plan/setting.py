"""Two engines that are not there and a request between them, laid out at made-up addresses."""

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
    """Two engines and a request, laid out at made-up addresses.

    Attributes:
        kinds: what layers keep, each kind once.
        src_rows, dst_rows: kind of each group of source and destination.
        srcs, dsts: ranks of source and destination.
        here, there: block tables of both.
        span: how much moves.
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
        """What one rank of the destination reads from every rank of the source.

        Raises:
            Incompatible: the two cannot exchange this model's cache.
        """
        return build_templates(self.srcs, self.dsts[number])

    def cells(self, route: Route, kind: GroupKind, attention_span: int) -> Cells:
        """What moves of a route, were its group of this kind."""
        src, dst = self.here.by_group[route.src_group], self.there.by_group[route.dst_group]
        return select_cells(
            route, kind, attention_span=attention_span, span=self.span, src_table=src, dst_table=dst
        )


def set_up(
    reading: ModelReading, sides: tuple[EngineSide, EngineSide], tokens: int, *, separate: bool = False
) -> PlannedTransfer:
    """Lay both engines out, and the request on them.

    Args:
        reading: the model.
        sides: source and destination.
        tokens: of the prompt.
        separate: K and V as pages of their own on both sides.

    Raises:
        KVFerryError: an engine cannot be set up so.
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
