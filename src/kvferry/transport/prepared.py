"""The ways of a peer's routes, prepared: entries in lists of both sides, and the loops that unpack images.

All of it is made at connect; what a request adds is which blocks, and where in the staging areas.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvferry.errors import TransferError
from kvferry.geometry import RankGeometry
from kvferry.memory.copy import Loops
from kvferry.memory.space import Space
from kvferry.planning.pieces import Int64s
from kvferry.planning.request import Ends, Indices, Int32s, Tally, as_indices, paired, tally
from kvferry.planning.select import Cells
from kvferry.planning.strategy import Costs, Strategy, Way, choose, ways
from kvferry.planning.template import Route
from kvferry.transport.area import Area, positions
from kvferry.transport.gather_messages import GatherRoute
from kvferry.transport.messages import RankCard


class List:
    """Entries of one side, row after row; becomes a prepared list."""

    def __init__(self) -> None:
        self._tables = [np.empty((0, 4), np.int64)]
        self.entries = 0

    def add(self, address: Int64s, length: Int64s, stride: int, count: int) -> int:
        """Add rows of `count` entries each, `stride` bytes apart; returns where they begin."""
        base = self.entries
        table = np.empty((len(address), 4), np.int64)
        table[:, 0], table[:, 1], table[:, 2], table[:, 3] = address, length, stride, count
        self._tables.append(table)
        self.entries += len(address) * count
        return base

    def table(self) -> Int64s:
        """(address, length, stride, count) per row, int64 of shape (n, 4)."""
        return np.concatenate(self._tables)


@dataclass(frozen=True, slots=True)
class PreparedWay:
    """One way, ready to be used.

    Attributes:
        way: which.
        rows: rows of a cell, by phase.
        src_base, dst_base: where its entries begin in each list.
        src_count, dst_count: entries per row.
        gather: number of the route among those introduced to the source, -1 if nothing is gathered.
        scatter: loops from images to blocks, by phase; empty if nothing is scattered.
    """

    way: Way
    rows: tuple[int, ...]
    src_base: int
    src_count: int
    dst_base: int
    dst_count: int
    gather: int = -1
    scatter: tuple[Loops, ...] = ()

    @property
    def stride(self) -> int:
        """Bytes from one image to the next."""
        return self.way.image.stride if self.way.image else 0

    @property
    def most_images(self) -> int:
        """How many there should be in a chunk at most: several chunks must find room in either area."""
        areas = [*([self.src_count] if self.gather >= 0 else []), *([self.dst_count] if self.scatter else [])]
        return max(1, min(areas) // 4)

    def indices(self, cells: Cells, outgoing: int, landing: int) -> Indices:
        """Entries for a chunk of cells, whose images begin at these positions of the areas."""
        count = len(cells)
        src: Int64s | Int32s = cells.src_block
        dst: Int64s | Int32s = cells.dst_block
        if self.gather >= 0:
            src = np.arange(outgoing, outgoing + count, dtype=np.int32)
        if self.scatter:
            dst = np.arange(landing, landing + count, dtype=np.int32)
        return paired(
            self.rows,
            cells.phase,
            Ends(src, self.src_count, self.src_base),
            Ends(dst, self.dst_count, self.dst_base),
        )


@dataclass(frozen=True, slots=True)
class PreparedRoute:
    """A route and the ways it can go.

    Attributes:
        route: which layers, retiled how.
        ways: the first is direct, if that is possible.
        clearing: loops over everything the route writes in a block.
    """

    route: Route
    ways: tuple[PreparedWay, ...]
    clearing: Loops

    @property
    def direct(self) -> PreparedWay | None:
        """The direct way."""
        return next((p for p in self.ways if p.way.strategy is Strategy.DIRECT), None)

    def direct_indices(self, cells: Cells) -> Indices:
        """Entries of the direct way."""
        assert self.direct is not None  # noqa: S101 - callers have chosen it
        return as_indices(self.route, cells, self.direct.src_base, self.direct.dst_base)

    def chosen(self, cells: int, costs: Costs, pinned: Strategy | None) -> PreparedWay:
        """The way that should take least time for so many cells."""
        return self.ways[choose([prepared.way for prepared in self.ways], cells, costs, pinned)]

    def tally(self, cells: Cells, chosen: PreparedWay) -> Tally:
        """What is counted of cells that go that way."""
        if chosen.way.image is None:
            return tally(self.route, cells)
        count, longest = len(cells), max(int(s.length.max()) for s in chosen.way.image.stretches)
        if chosen.way.landing is not None:
            longest = chosen.stride
        rows = round(count * sum(chosen.rows) / len(chosen.rows))
        return Tally(self.route.cell_bytes * count, rows, rows, longest if count else 0)


class Preparation:
    """Prepares all routes from one rank of a peer.

    Attributes:
        src, dst: the lists.
        gathers: what to introduce to the rank.
        routes: in the template's order.
    """

    def __init__(self, ours: RankGeometry, landing: Area, card: RankCard, costs: Costs) -> None:
        self.src, self.dst = List(), List()
        self.gathers: list[GatherRoute] = []
        self.routes: list[PreparedRoute] = []
        self._space = Space(ours.regions)
        self._landing, self._card, self._costs = landing, card, costs
        self._cuts = [region.address for region in card.geometry.regions]

    def add(self, route: Route) -> None:
        """Prepare one more route."""
        there = self._card.outgoing
        room = min(self._landing.largest_image, there.bytes // 4 if there else 0)
        found = ways(route, self._costs, self._landing.largest_image, self._cuts)
        made = [self._made(route, way) for way in found if self._possible(way, room)]
        if not made:
            raise TransferError(
                f"cells of {route.cell_bytes} bytes in {route.row_count} runs can only move staged, and the "
                "peer does not gather; set staging_mib there"
            )
        written = [nest for phase in route.nests for nest in phase]
        clearing = Loops(
            [nest.at(-nest.src, 0) for nest in written],
            self._space,
            "dst",
            route.dst_stride,
            route.dst_blocks,
        )
        self.routes.append(PreparedRoute(route, tuple(made), clearing))

    def _possible(self, way: Way, room: int) -> bool:
        if way.strategy is not Strategy.STAGED or way.image is None:
            return True
        return self._card.outgoing is not None and way.image.stride <= room

    def _made(self, route: Route, way: Way) -> PreparedWay:
        image = way.image
        if image is None:
            rows = route.rows
            return PreparedWay(
                way,
                tuple(len(phase) for phase in route.phases),
                self.src.add(rows.src, rows.length, route.src_stride, route.src_blocks),
                route.src_blocks,
                self.dst.add(rows.dst, rows.length, route.dst_stride, route.dst_blocks),
                route.dst_blocks,
            )
        here = positions(self._landing.region.length, image.stride)
        scatter = self._scatter(route, way)
        src, dst, length, rows_of = _rows(way)
        landing = self._landing.region.address
        if way.strategy is Strategy.OVER_READ:
            src_base = self.src.add(src, length, route.src_stride, route.src_blocks)
            dst_base = self.dst.add(dst + landing, length, image.stride, here)
            return PreparedWay(way, rows_of, src_base, route.src_blocks, dst_base, here, -1, scatter)
        outgoing = self._card.outgoing
        assert outgoing is not None  # noqa: S101 - see _possible
        there = positions(outgoing.bytes, image.stride)
        src_base = self.src.add(src + outgoing.address, length, image.stride, there)
        if scatter:
            dst_base, dst_count = self.dst.add(dst + landing, length, image.stride, here), here
        else:
            dst_base = self.dst.add(dst, length, route.dst_stride, route.dst_blocks)
            dst_count = route.dst_blocks
        gather = GatherRoute(route.src_stride, route.src_blocks, image.stride, image.nests)
        if gather not in self.gathers:
            self.gathers.append(gather)
        return PreparedWay(
            way, rows_of, src_base, there, dst_base, dst_count, self.gathers.index(gather), scatter
        )

    def _scatter(self, route: Route, way: Way) -> tuple[Loops, ...]:
        if way.scatters is None:
            return ()
        return tuple(
            Loops(nests, self._space, "dst", route.dst_stride, route.dst_blocks) for nests in way.scatters
        )


def _rows(way: Way) -> tuple[Int64s, Int64s, Int64s, tuple[int, ...]]:
    """Source, destination and length of what is read of a cell, phase after phase; and rows by phase."""
    image = way.image
    assert image is not None  # noqa: S101
    if way.landing is not None:
        whole = np.array([image.bytes], np.int64)
        return np.zeros(1, np.int64), np.zeros(1, np.int64), whole, (1,)
    parts = image.stretches
    return (
        np.concatenate([p.src for p in parts]),
        np.concatenate([p.dst for p in parts]),
        np.concatenate([p.length for p in parts]),
        tuple(map(len, parts)),
    )
