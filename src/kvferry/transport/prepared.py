"""The ways of a peer's routes, prepared: entries in lists of both sides, and the loops that unpack images.

All of it is made at connect; what a request adds is which blocks, and where in the staging areas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from kvferry.errors import TransferError
from kvferry.geometry import RankGeometry
from kvferry.memory.copy import Loops
from kvferry.memory.space import Space
from kvferry.planning.pieces import Int64s
from kvferry.planning.request import Ends, Indices, Int32s, Tally, as_indices, paired, tally
from kvferry.planning.select import Cells
from kvferry.planning.strategy import FETCHED_CHUNK_BYTES, Costs, Strategy, Way, choose, chunk_bytes, ways
from kvferry.planning.template import Route
from kvferry.transport.area import Area, positions
from kvferry.transport.gather_messages import MAX_NESTS, GatherRoute
from kvferry.transport.messages import RankCard

MAX_DESCRIPTORS = 1 << 26
"""Entries of one prepared list: indices are int32, and NIXL keeps some tens of bytes for each."""


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Rows of one side: address and length, int64 of shape (n,); of each so many entries, so far apart."""

    address: Int64s
    length: Int64s
    stride: int
    count: int

    @property
    def entries(self) -> int:
        """Entries of all rows."""
        return len(self.address) * self.count


_Prepared: TypeAlias = tuple[Way, _Rows, _Rows]


class List:
    """Entries of one side, row after row; becomes a prepared list."""

    def __init__(self) -> None:
        self._tables = [np.empty((0, 4), np.int64)]
        self.entries = 0

    def add(self, rows: _Rows) -> int:
        """Add rows; returns where their entries begin."""
        base = self.entries
        table = np.empty((len(rows.address), 4), np.int64)
        table[:, 0], table[:, 1], table[:, 2:] = rows.address, rows.length, (rows.stride, rows.count)
        self._tables.append(table)
        self.entries += rows.entries
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

    def chunk_cells(self, cells: int) -> int:
        """Of so many cells, how many travel at a time: several chunks must find room in either area."""
        areas = [*([self.src_count] if self.gather >= 0 else []), *([self.dst_count] if self.scatter else [])]
        size = chunk_bytes(cells * self.stride) if self.gather >= 0 else FETCHED_CHUNK_BYTES
        wanted = size // self.stride
        return max(1, min(wanted, *(room // 4 for room in areas)))

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
        possible = [(way, *self._rows(route, way)) for way in found if self._possible(way, room)]
        made = [self._made(route, *prepared) for prepared in self._fitting(possible)]
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
        introduced = sum(len(phase) for gather in self.gathers for phase in gather.nests)
        nests = introduced + sum(map(len, way.image.nests))
        return self._card.outgoing is not None and way.image.stride <= room and nests <= MAX_NESTS

    def _fitting(self, found: list[_Prepared]) -> list[_Prepared]:
        """Without those of most entries, where the lists have no room for all."""
        while len(found) > 1 and any(
            so_far.entries + sum(rows[side].entries for _, *rows in found) > MAX_DESCRIPTORS
            for side, so_far in enumerate((self.src, self.dst))
        ):
            most = max(range(len(found)), key=lambda i: max(rows.entries for rows in found[i][1:]))
            found = found[:most] + found[most + 1 :]
        return found

    def _rows(self, route: Route, way: Way) -> tuple[_Rows, _Rows]:
        """What a way takes in either list."""
        image = way.image
        if image is None:
            rows = route.rows
            return (
                _Rows(rows.src, rows.length, route.src_stride, route.src_blocks),
                _Rows(rows.dst, rows.length, route.dst_stride, route.dst_blocks),
            )
        src, dst, length = _stretches(way)
        landing = self._landing.region
        here = positions(landing.length, image.stride)
        landed = _Rows(dst + landing.address, length, image.stride, here)
        if way.strategy is Strategy.OVER_READ:
            return _Rows(src, length, route.src_stride, route.src_blocks), landed
        outgoing = self._card.outgoing
        assert outgoing is not None  # noqa: S101 - see _possible
        there = positions(outgoing.bytes, image.stride)
        in_place = _Rows(dst, length, route.dst_stride, route.dst_blocks)
        return _Rows(src + outgoing.address, length, image.stride, there), landed if way.landing else in_place

    def _made(self, route: Route, way: Way, src: _Rows, dst: _Rows) -> PreparedWay:
        rows = _counts(route, way)
        ends = self.src.add(src), src.count, self.dst.add(dst), dst.count
        if way.strategy is not Strategy.STAGED or way.image is None:
            return PreparedWay(way, rows, *ends, -1, self._scatter(route, way))
        gather = GatherRoute(route.src_stride, route.src_blocks, way.image.stride, way.image.nests)
        if gather not in self.gathers:
            self.gathers.append(gather)
        return PreparedWay(way, rows, *ends, self.gathers.index(gather), self._scatter(route, way))

    def _scatter(self, route: Route, way: Way) -> tuple[Loops, ...]:
        if way.scatters is None:
            return ()
        return tuple(
            Loops(nests, self._space, "dst", route.dst_stride, route.dst_blocks) for nests in way.scatters
        )


def _counts(route: Route, way: Way) -> tuple[int, ...]:
    """Rows of a cell, by phase."""
    if way.image is None:
        return tuple(map(len, route.phases))
    return (1,) if way.landing is not None else tuple(map(len, way.image.stretches))


def _stretches(way: Way) -> tuple[Int64s, Int64s, Int64s]:
    """Source, destination and length of what is read of a cell, phase after phase."""
    image = way.image
    assert image is not None  # noqa: S101
    if way.landing is not None:
        whole = np.array([image.bytes], np.int64)
        return np.zeros(1, np.int64), np.zeros(1, np.int64), whole
    parts = image.stretches
    return (
        np.concatenate([p.src for p in parts]),
        np.concatenate([p.dst for p in parts]),
        np.concatenate([p.length for p in parts]),
    )
