"""Prepare the transfer methods of a peer's routes: descriptor lists, and copies that unpack images.

A route is a set of layers that are read from one rank with the same copies. A cell is the unit of transfer:
the largest number of tokens that divides the block sizes of both sides. An image is a cell packed into
contiguous staging memory. A method moves cells directly (one descriptor per contiguous run) or as images.

All of this is prepared when a peer connects. A read then supplies only block ids and positions in staging
areas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from kvferry.errors import TransferError
from kvferry.geometry import RankGeometry
from kvferry.memory.address_space import AddressSpace
from kvferry.memory.staging_copies import StagingCopies
from kvferry.planning.cell_copy import ONE_CELL, Offsets, PoolCopies
from kvferry.planning.descriptors import Int64s
from kvferry.planning.prepared_lists import (
    DescriptorIndices,
    Int32s,
    PreparedEntries,
    TransferCounts,
    count_transfer,
)
from kvferry.planning.select import Cells
from kvferry.planning.strategy import (
    FETCHED_SEGMENT_BYTES,
    Costs,
    Strategy,
    TransferMethod,
    choose_method,
    segment_bytes,
    transfer_methods,
)
from kvferry.planning.template import Route, build_templates
from kvferry.transport.gather_messages import MAX_CELLS, MAX_STRIDED_COPIES, GatherRoute
from kvferry.transport.messages import RankCard
from kvferry.transport.shared_area import MappedArea
from kvferry.transport.staging import StagingArea, image_capacity

_GATHERED = (Strategy.STAGED, Strategy.SHARED)
"""Strategies for which the source packs the cells."""

MAX_DESCRIPTORS = 1 << 26
"""Maximum number of entries in a prepared list: indices are int32, and NIXL keeps tens of bytes for each."""


@dataclass(frozen=True, slots=True, eq=False)
class _DescriptorRows:
    """All descriptors that a transfer method may need on one side: the source or this rank.

    There is one descriptor for each contiguous run of bytes in each cell (part of a block that moves as one
    unit) of each block. A *row* stands for the descriptors of one run in all cells of all blocks. On a side
    where the method uses staging memory, images (packed cells) take the place of blocks.

    Attributes:
        parts: groups of rows. Each group is (address of each row for the cell at offset 0 of block 0 or image
            0, length of each row in bytes, byte offset of each cell in a block). Addresses and lengths are
            int64 of shape (n,).
        stride: bytes from one block or image to the next.
        count: number of blocks or images.
    """

    parts: tuple[tuple[Int64s, Int64s, Offsets], ...]
    stride: int
    count: int

    @property
    def rows(self) -> int:
        """Number of rows (contiguous runs) per cell (part of a block)."""
        return sum(len(address) for address, _, _ in self.parts)

    @property
    def cells(self) -> int:
        """Number of cells (parts of a block) in each block; 1 for images (packed cells)."""
        return len(self.parts[0][2]) if self.parts else 1

    @property
    def entries(self) -> int:
        """Number of descriptors: one per combination of row, cell and block (or image)."""
        return self.rows * self.cells * self.count


_Prepared: TypeAlias = tuple[TransferMethod, _DescriptorRows, _DescriptorRows]


class DescriptorList:
    """A builder for a list of NIXL descriptors, either of this rank's memory or of a peer rank's memory.

    A descriptor is the address and the length of a piece of memory.

    Attributes:
        entries: number of descriptors so far.
    """

    def __init__(self, max_descriptors: int = MAX_DESCRIPTORS) -> None:
        self._tables, self._most = [np.empty((0, 4), np.int64)], max_descriptors
        self.entries = 0

    def add(self, rows: _DescriptorRows) -> int:
        """Append the descriptors of one transfer method, and return the index of the first of them.

        Args:
            rows: descriptors to append, in compact form.

        Raises:
            TransferError: the list would have more than the maximum number of descriptors.
        """
        base = self.entries
        if base + rows.entries > self._most:
            raise TransferError(f"{base + rows.entries} descriptors would be prepared, at most {self._most}")
        for address, length, at in rows.parts:
            table = np.empty((len(address), len(at), 4), np.int64)
            table[:, :, 0] = address[:, None] + np.array(at, np.int64)
            table[:, :, 1], table[:, :, 2:] = length[:, None], (rows.stride, rows.count)
            self._tables.append(table.reshape(-1, 4))
        self.entries += rows.entries
        return base

    def table(self) -> Int64s:
        """Return the descriptor list in the form that `Agent.prepare` takes: int64 of shape (n, 4).

        The columns are address, length and stride in bytes, and number of descriptors.
        """
        return np.concatenate(self._tables)


@dataclass(frozen=True, slots=True)
class PreparedMethod:
    """A transfer method of a route, with the descriptors and copy operations that the method needs.

    These are prepared when the peer is connected. A route is a set of layers that are read together. A cell
    is the part of a block that moves as one unit.

    Attributes:
        method: transfer method.
        rows: number of descriptors per cell.
        src, dst: the method's entries in the prepared descriptor list of each side (source, this worker).
        announced_route: index of the route in the message `AnnounceRoutes` to the source; -1 if the source
            packs nothing.
        scatter: copies that unpack cells from staging memory into blocks; None if this worker unpacks
            nothing.
        shared: the source's outgoing file, mapped here, from which cells are unpacked; None if a READ takes
            the cells.
    """

    method: TransferMethod
    rows: int
    src: PreparedEntries
    dst: PreparedEntries
    announced_route: int = -1
    scatter: StagingCopies | None = None
    shared: MappedArea | None = None

    @property
    def stride(self) -> int:
        """Bytes from one image (packed cell) to the next; 0 if the method uses no images."""
        return self.method.image.stride if self.method.image else 0

    def segment_cells(self, cells: int) -> int:
        """Return the number of cells (parts of blocks) in a segment. The cells of a segment move together.

        A segment takes at most a quarter of each staging area that the method uses, so that several segments
        can be in progress at a time.

        Args:
            cells: total number of cells in the transfer.
        """
        areas = [self.src.blocks] if self.announced_route >= 0 else []
        areas += [self.dst.blocks] if self.scatter is not None else []
        size = segment_bytes(cells * self.stride) if self.announced_route >= 0 else FETCHED_SEGMENT_BYTES
        wanted = size // self.stride
        return max(1, min(wanted, *(room // 4 for room in areas)))

    def indices(self, cells: Cells, outgoing: int, landing: int) -> DescriptorIndices:
        """Return the descriptors of these cells, as indices into the lists of the source and of this worker.

        Args:
            cells: cells (parts of blocks) to move.
            outgoing: index of the first packed cell in the source's staging area; ignored if the source packs
                nothing.
            landing: index of the first packed cell in this worker's staging area; ignored if this worker
                unpacks nothing.
        """
        count = len(cells)
        src: Int64s | Int32s = cells.src_block
        dst: Int64s | Int32s = cells.dst_block
        if self.announced_route >= 0:
            src = np.arange(outgoing, outgoing + count, dtype=np.int32)
        if self.scatter is not None:
            dst = np.arange(landing, landing + count, dtype=np.int32)
        return DescriptorIndices(
            self.src.of(self.rows, src, cells.number), self.dst.of(self.rows, dst, cells.number)
        )


@dataclass(frozen=True, slots=True)
class PreparedRoute:
    """A route (set of layers that are read together) with all transfer methods that can move it.

    Attributes:
        route: layers and copies.
        methods: prepared methods. If the cells (parts of blocks) can be read without packing, the first
            method does that.
        clearing: operation that zeroes those bytes of a block that the route writes.
    """

    route: Route
    methods: tuple[PreparedMethod, ...]
    clearing: StagingCopies

    @property
    def direct(self) -> PreparedMethod | None:
        """The method that reads cells (parts of blocks) straight into this rank's KV blocks, without packing.

        None if the route has no such method.
        """
        return next((p for p in self.methods if p.method.strategy is Strategy.DIRECT), None)

    def direct_indices(self, cells: Cells) -> DescriptorIndices:
        """Return the indices of the descriptors to read cells (parts of blocks) straight into KV blocks.

        The indices refer to the prepared descriptor lists of the source and of this worker. The route must
        have a method that reads cells without packing (`direct`).
        """
        assert self.direct is not None  # noqa: S101 - callers check that it exists
        return self.direct.indices(cells, 0, 0)

    def src_cell(self, cells: Cells) -> int:
        """Return the index, within its source block, of the first of these cells (parts of blocks)."""
        return int(cells.number[0]) % self.route.src_cells

    def choose(self, cells: int, costs: Costs, strategy: Strategy | None) -> PreparedMethod:
        """Return the transfer method that is expected to move a number of cells (parts of blocks) fastest.

        Args:
            cells: number of cells to move.
            costs: measured transfer costs of this machine.
            strategy: strategy that the method must have; None for any. Ignored if the route has no method of
                this strategy.
        """
        return self.methods[
            choose_method([prepared.method for prepared in self.methods], cells, costs, strategy)
        ]

    def counts(self, cells: Cells, prepared: PreparedMethod) -> TransferCounts:
        """Return the number of bytes and descriptors that a transfer of cells needs.

        Args:
            cells: cells (parts of blocks) to move.
            prepared: method that moves the cells.
        """
        if prepared.method.image is None:
            return count_transfer(self.route, cells)
        count, longest = len(cells), prepared.method.image.longest
        if prepared.method.landing is not None:
            longest = prepared.stride
        rows = count * prepared.rows
        pages = rows if prepared.shared is None else count
        return TransferCounts(self.route.cell_bytes * count, pages, rows, longest if count else 0)


class RoutePreparation:
    """Prepares the transfer of all routes from one rank of a peer to this rank.

    A route is a set of layers that are read together. A cell is the part of a block that moves as one unit.

    Attributes:
        src, dst: builders of the descriptor lists of the peer's rank and of this rank.
        gathers: routes to announce to the peer's rank, which packs their cells on request.
        routes: prepared routes, in the order of the `add` calls.
    """

    def __init__(
        self,
        own_geometry: RankGeometry,
        landing: StagingArea,
        card: RankCard,
        costs: Costs,
        max_descriptors: int = MAX_DESCRIPTORS,
        max_strided_copies: int = MAX_STRIDED_COPIES,
        shared: MappedArea | None = None,
    ) -> None:
        """Create empty descriptor lists for reading from one rank of a peer.

        Args:
            own_geometry: geometry of this rank.
            landing: staging area into which images (packed cells) are read.
            card: description of the peer's rank.
            costs: measured transfer costs of this machine. They decide whether two runs of bytes are read
                with one descriptor each, or with one that also covers the bytes between them.
            max_descriptors: maximum length of each list.
            max_strided_copies: maximum number of strided copies in the announced routes.
            shared: outgoing file of the peer's rank, mapped here; None if it cannot be mapped.
        """
        self._shared = shared
        self._max_descriptors, self._max_strided_copies = max_descriptors, max_strided_copies
        self.src, self.dst = DescriptorList(max_descriptors), DescriptorList(max_descriptors)
        self.gathers: list[GatherRoute] = []
        self.routes: list[PreparedRoute] = []
        self._space = AddressSpace(own_geometry.regions)
        self._landing, self._card, self._costs = landing, card, costs
        self._region_starts = [region.address for region in card.geometry.regions]

    def add(self, route: Route) -> None:
        """Prepare a route: append its descriptors to `src` and `dst`, and the prepared route to `routes`.

        Args:
            route: set of layers that are read together.

        Raises:
            TransferError: no method can move the route, or the lists would be too long.
        """
        there = self._card.outgoing
        room = min(self._landing.largest_image, there.bytes // 4 if there else 0)
        found = transfer_methods(
            route,
            self._costs,
            self._landing.largest_image,
            self._region_starts,
            shared=self._shared is not None,
        )
        possible = [
            (method, *self._descriptor_rows(route, method))
            for method in found
            if self._is_possible(method, room)
        ]
        made = [self._prepare_method(route, *prepared) for prepared in self._drop_largest(possible)]
        if not made:
            raise TransferError(
                f"cells of {route.cell_bytes} bytes in {route.run_count} runs can only move staged, and the "
                "peer does not gather; set staging_mib there"
            )
        self.routes.append(PreparedRoute(route, tuple(made), _clearing(route, self._space)))

    def _is_possible(self, method: TransferMethod, room: int) -> bool:
        if method.strategy not in _GATHERED or method.image is None:
            return True
        parts = [*(part for gather in self.gathers for part in gather.parts), *method.image.pool_copies]
        few = (
            sum(len(part.nests) for part in parts) <= self._max_strided_copies
            and sum(len(p.at) for p in parts) <= MAX_CELLS
        )
        return self._card.outgoing is not None and method.image.stride <= room and few

    def _drop_largest(self, found: list[_Prepared]) -> list[_Prepared]:
        """Drop transfer methods until the descriptors of the others fit in the lists; return the others.

        Methods that need the most descriptors are dropped first. One method is always kept, even if its
        descriptors do not fit.

        Args:
            found: methods that can move the same layers, each as (method, its descriptors in the source's
                memory, its descriptors in this rank's memory).
        """
        while len(found) > 1 and any(
            so_far.entries + sum(rows[side].entries for _, *rows in found) > self._max_descriptors
            for side, so_far in enumerate((self.src, self.dst))
        ):
            most = max(range(len(found)), key=lambda i: max(rows.entries for rows in found[i][1:]))
            found = found[:most] + found[most + 1 :]
        return found

    def _descriptor_rows(
        self, route: Route, method: TransferMethod
    ) -> tuple[_DescriptorRows, _DescriptorRows]:
        """Return, in compact form, all descriptors that a transfer method may need.

        Args:
            route: set of layers that are read together.
            method: transfer method of the route.

        Returns:
            (descriptors in the source's memory, descriptors in this rank's memory).
        """
        image = method.image
        pools = (route.src_stride, route.src_blocks), (route.dst_stride, route.dst_blocks)
        if image is None:
            both = [(cell_copy, cell_copy.descriptors) for cell_copy in route.cell_copies]
            return (
                _DescriptorRows(
                    tuple((rows.src, rows.length, cell_copy.src_offsets) for cell_copy, rows in both),
                    *pools[0],
                ),
                _DescriptorRows(
                    tuple((rows.dst, rows.length, cell_copy.dst_offsets) for cell_copy, rows in both),
                    *pools[1],
                ),
            )
        landing = self._landing.region
        here = image.stride, image_capacity(landing.length, image.stride)
        read = image.reads
        if method.strategy is Strategy.OVER_READ:
            fetched = tuple((part.descriptors.src, part.descriptors.length, part.at) for part in read)
            inside = tuple(
                (part.descriptors.dst + landing.address, part.descriptors.length, ONE_CELL) for part in read
            )
            return _DescriptorRows(fetched, *pools[0]), _DescriptorRows(inside, *here)
        outgoing = self._card.outgoing
        assert outgoing is not None  # noqa: S101 - `_is_possible` requires it
        there = image.stride, image_capacity(outgoing.bytes, image.stride)
        if method.strategy is Strategy.SHARED:
            return _DescriptorRows((), *there), _DescriptorRows((), *there)
        if method.landing is not None:
            whole = np.array([image.bytes], np.int64)
            ends = [
                ((np.array([at], np.int64), whole, ONE_CELL),) for at in (outgoing.address, landing.address)
            ]
            return _DescriptorRows(ends[0], *there), _DescriptorRows(ends[1], *here)
        packed = tuple(
            (part.descriptors.src + outgoing.address, part.descriptors.length, ONE_CELL) for part in read
        )
        placed = tuple((part.descriptors.dst, part.descriptors.length, part.at) for part in read)
        return _DescriptorRows(packed, *there), _DescriptorRows(placed, *pools[1])

    def _prepare_method(
        self, route: Route, method: TransferMethod, src: _DescriptorRows, dst: _DescriptorRows
    ) -> PreparedMethod:
        ends = (
            PreparedEntries(self.src.add(src), src.count, src.cells),
            PreparedEntries(self.dst.add(dst), dst.count, dst.cells),
        )
        scatter = None
        if method.scatters is not None:
            scatter = StagingCopies(method.scatters, self._space, "dst", route.dst_stride, route.dst_blocks)
        if method.strategy not in _GATHERED or method.image is None:
            return PreparedMethod(method, src.rows, *ends, -1, scatter)
        gather = GatherRoute(
            route.src_stride, route.src_blocks, method.image.stride, method.image.pool_copies
        )
        if gather not in self.gathers:
            self.gathers.append(gather)
        shared = self._shared if method.strategy is Strategy.SHARED else None
        return PreparedMethod(method, src.rows, *ends, self.gathers.index(gather), scatter, shared)


def _clearing(route: Route, space: AddressSpace) -> StagingCopies:
    """Return an operation that zeroes those bytes of a block that a route writes.

    Args:
        route: set of layers that are read together.
        space: memory of this rank's KV cache.
    """
    written = [
        PoolCopies(cell_copy.dst_offsets, tuple(copy.at(-copy.src, 0) for copy in cell_copy.copies))
        for cell_copy in route.cell_copies
    ]
    return StagingCopies(written, space, "dst", route.dst_stride, route.dst_blocks)


def page_clearings(rank: RankGeometry) -> tuple[tuple[int, StagingCopies], ...]:
    """Return operations that zero all bytes of given blocks, for each KV cache group of a rank.

    Args:
        rank: geometry of the rank.

    Returns:
        One or more operations for each group, as (index of the group, operation). An operation zeroes the
        bytes of some layers in given blocks. Together the operations of a group cover all its layers.
    """
    space = AddressSpace(rank.regions)
    (itself,) = build_templates([rank], rank)
    return tuple((route.dst_group, _clearing(route, space)) for route in itself.routes)
