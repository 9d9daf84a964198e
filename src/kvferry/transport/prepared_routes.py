"""Prepare the transfer methods of a peer's routes: descriptor lists, and copies that unpack images.

A method moves cells directly (one descriptor per contiguous run) or as images. All of this is prepared when a
peer connects. A read then supplies only block ids and positions in staging areas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry.common.errors import TransferError
from kvferry.geometry import RankGeometry, Region
from kvferry.memory.address_space import AddressSpace
from kvferry.memory.copies import StagingCopies
from kvferry.planning.cell_copy import ONE_CELL, Offsets, PoolCopies
from kvferry.planning.descriptors import Int64s
from kvferry.planning.digest_image import digest_image
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
    MethodPrices,
    Strategy,
    TransferMethod,
    segment_bytes,
    transfer_methods,
)
from kvferry.planning.template import Route, build_templates
from kvferry.transport.gather_client import (
    MAX_CELLS,
    MAX_DIGEST_BYTES,
    MAX_STRIDED_COPIES,
    GatherClient,
    GatherRoute,
)
from kvferry.transport.messages import WORD_BYTES, Outgoing, RankCard
from kvferry.transport.read_speed import ReadSpeed
from kvferry.transport.staging import LaneResources, SharedArea, StagingArea

# Maximum number of entries in a prepared list: indices are int32, and NIXL keeps tens of bytes for each.
MAX_DESCRIPTORS = 1 << 26


@dataclass(frozen=True, slots=True, eq=False)
class _Descriptors:
    """Descriptors of a transfer method on one side: one per run (*row*) of each cell of a block or image."""

    table: Int64s  # a line per row and cell of block 0, as for `Agent.prepare`: shape (rows · cells, 4)
    count: int  # blocks or images
    cells: int  # per block; 1 for images

    @property
    def rows(self) -> int:
        return len(self.table) // self.cells

    @property
    def entries(self) -> int:
        return len(self.table) * self.count


def _descriptors(runs: Iterable[tuple[Int64s, Int64s, Offsets]], stride: int, count: int) -> _Descriptors:
    """Return the descriptors of runs that are repeated in `count` blocks or images, every `stride` bytes.

    `runs` are address and length, int64 of shape (n,), for the cell at offset 0, and all cells' offsets.
    """
    tables, cells = [np.empty((0, 4), np.int64)], 1
    for address, length, at in runs:
        table = np.empty((len(address), len(at), 4), np.int64)
        table[:, :, 0] = address[:, None] + np.array(at, np.int64)
        table[:, :, 1], table[:, :, 2:] = length[:, None], (stride, count)
        tables.append(table.reshape(-1, 4))
        cells = len(at)
    return _Descriptors(np.concatenate(tables), count, cells)


class _DescriptorList:
    def __init__(self, max_descriptors: int) -> None:
        self._tables, self._most = [np.empty((0, 4), np.int64)], max_descriptors
        self.entries = 0

    def add(self, descriptors: _Descriptors) -> PreparedEntries:
        """Append the descriptors of one method, and return where they are, or raise TransferError."""
        base = self.entries
        self.entries += descriptors.entries
        if self.entries > self._most:
            raise TransferError(f"{self.entries} descriptors would be prepared, at most {self._most}")
        self._tables.append(descriptors.table)
        return PreparedEntries(base, descriptors.count, descriptors.cells)

    def table(self) -> Int64s:
        return np.concatenate(self._tables)


@dataclass(frozen=True, slots=True)
class PreparedMethod:
    """A transfer method of a route, with the descriptors and copies that it needs."""

    method: TransferMethod
    rows: int  # descriptors per cell
    src: PreparedEntries  # entries in the prepared list of each side
    dst: PreparedEntries
    announced_route: int = -1  # index in `AnnounceRoutes`; -1 if the source packs nothing
    scatter: StagingCopies | None = None  # None if this worker unpacks nothing
    shared: SharedArea | None = None  # the source's outgoing file; None if a READ takes the cells

    @property
    def stride(self) -> int:
        return self.method.image.stride if self.method.image else 0

    def segments(self, cells: Cells) -> Iterator[Cells]:
        """Split cells into segments of equal size, in the same order. The last may be shorter."""
        size, areas = FETCHED_SEGMENT_BYTES, list[int]()
        if self.announced_route >= 0:
            size = segment_bytes(len(cells) * self.stride)
            areas.append(self.src.blocks)
        if self.scatter is not None:
            areas.append(self.dst.blocks)
        whole = int(size // (self.stride or self.method.work.bytes))
        # A quarter of each staging area, so that several segments can be in progress at a time.
        each = max(1, min([whole, *(room // 4 for room in areas)]))
        # One after the other: while the first are read, the lane has time to cut off the others.
        return (cells[at : at + each] for at in range(0, len(cells), each))

    def indices(self, cells: Cells, outgoing: int, landing: int) -> DescriptorIndices:
        """Return the cells' descriptors as indices. `outgoing` and `landing` are the first images there."""
        count = len(cells)
        src: Int64s | Int32s = cells.src_block
        dst: Int64s | Int32s = cells.dst_block
        if self.announced_route >= 0:
            src = np.arange(outgoing, outgoing + count, dtype=np.int32)
        if self.scatter is not None:
            dst = np.arange(landing, landing + count, dtype=np.int32)
        return DescriptorIndices(
            self.src.of(self.rows, src, cells.src_number), self.dst.of(self.rows, dst, cells.dst_number)
        )

    def counts(self, route: Route, cells: Cells) -> TransferCounts:
        if self.method.image is None:
            return count_transfer(route, cells)
        count, longest = len(cells), self.method.image.longest
        if self.method.landing is not None:
            longest = self.stride
        rows = count * self.rows
        # Images that are mapped need no descriptor, but count as pages that move.
        pages = rows if self.shared is None else count
        return TransferCounts(route.cell_bytes * count, pages, rows, longest if count else 0)


@dataclass(frozen=True, slots=True)
class PreparedDigest:
    """How both sides digest the cells of a route."""

    announced_route: int  # index in `AnnounceRoutes`
    stride: int  # bytes of a cell, rounded up
    copies: StagingCopies  # of this worker's blocks


class PreparedRoute:
    """A route with its methods, a direct one first. `clearing` zeroes the bytes of a block that it writes.

    `digest` is None if what is read is not verified.
    """

    def __init__(
        self,
        route: Route,
        methods: Sequence[PreparedMethod],
        clearing: StagingCopies,
        costs: Costs,
        digest: PreparedDigest | None = None,
    ) -> None:
        self.route, self.methods, self.clearing, self.digest = route, methods, clearing, digest
        self._prices = MethodPrices([each.method for each in methods], costs)

    @property
    def direct(self) -> PreparedMethod | None:
        first = self.methods[0]
        return first if first.method.strategy is Strategy.DIRECT else None

    def cheapest(self, cells: int, costs: Costs, strategy: Strategy | None) -> PreparedMethod:
        """Return the method that takes the shortest time for some cells, of `strategy` if any has it."""
        # Once at most, if the measured speed of the peer's READs differs from the machine's costs.
        if self._prices.costs is not costs:
            self._prices = MethodPrices([each.method for each in self.methods], costs)
        return self.methods[self._prices.cheapest(cells, strategy)]


@dataclass(frozen=True, slots=True)
class SourceRank:
    """A rank of a peer, with everything that is prepared to read from it."""

    card: RankCard
    agent: str  # NIXL's name of the rank
    routes: tuple[PreparedRoute, ...]
    local: Any  # NIXL's list of this worker's memory, cells and images; None if the rank supplies no KV
    remote: Any  # of the rank's memory
    local_words: Any  # of `LaneResources.words`
    remote_words: Any
    client: GatherClient | None  # asks the rank to gather; None if no method needs it
    speed: ReadSpeed
    not_shared: str  # why the rank's host memory is not mapped here; empty if it is


class _RoutePreparation:
    """Prepares the transfer of all routes from one rank of a peer to this rank. `gathers` are to announce."""

    def __init__(
        self,
        own_geometry: RankGeometry,
        landing: StagingArea,
        card: RankCard,
        costs: Costs,
        max_descriptors: int = MAX_DESCRIPTORS,
        max_strided_copies: int = MAX_STRIDED_COPIES,
        shared: SharedArea | None = None,
        verify: bool = False,
    ) -> None:
        """Create empty lists. `shared` is the outgoing file of the peer's rank, if it is mapped here."""
        self._verify = verify
        self._max_descriptors, self._max_strided_copies = max_descriptors, max_strided_copies
        self.src, self.dst = _DescriptorList(max_descriptors), _DescriptorList(max_descriptors)
        self.gathers: list[GatherRoute] = []
        self.routes: list[PreparedRoute] = []
        self._space = AddressSpace(own_geometry.regions)
        self._landing, self._card, self._costs, self._shared = landing, card, costs, shared

    def add(self, route: Route) -> None:
        """Prepare a route.

        Raise TransferError if no method can move it, it cannot be verified, or the lists would be too long.
        """
        digest = self._prepare_digest(route) if self._verify else None
        starts = [region.address for region in self._card.geometry.regions]
        shared = self._shared is not None
        found = transfer_methods(route, self._costs, self._landing.largest_image, starts, shared=shared)
        possible = [
            (method, *self._both_sides(route, method)) for method in found if self._is_possible(method)
        ]
        # The methods with the most descriptors are dropped until the others fit in the lists.
        while len(possible) > 1 and any(
            so_far.entries + sum(sides[number].entries for _, *sides in possible) > self._max_descriptors
            for number, so_far in enumerate((self.src, self.dst))
        ):
            del possible[max(range(len(possible)), key=lambda i: max(s.entries for s in possible[i][1:]))]
        made = [self._prepare_method(route, *prepared) for prepared in possible]
        if not made:
            raise TransferError(
                f"cells of {route.cell_bytes} bytes in {route.run_count} runs can only move staged, and the "
                "peer does not gather; set staging_mib there"
            )
        clearing = _clearing(route, self._space)
        self.routes.append(PreparedRoute(route, made, clearing, self._costs, digest))

    def _prepare_digest(self, route: Route) -> PreparedDigest:
        image = digest_image(route)
        if image.stride > MAX_DIGEST_BYTES or not self._can_announce(image.src):
            raise TransferError(
                f"what is read from the peer cannot be verified: a cell of {image.stride} bytes, at most "
                f"{MAX_DIGEST_BYTES}, and {self._max_strided_copies} strided copies of all routes; leave "
                "verify_transfers out"
            )
        self.gathers.append(GatherRoute(route.src_stride, route.src_blocks, image.stride, image.src))
        copies = StagingCopies(image.dst, self._space, "src", route.dst_stride, route.dst_blocks)
        return PreparedDigest(len(self.gathers) - 1, image.stride, copies)

    def _is_possible(self, method: TransferMethod) -> bool:
        if not _gathers(method) or method.image is None:
            return True
        # A quarter of its area, as of ours, so that several segments can be in progress.
        there = self._card.outgoing
        room = min(self._landing.largest_image, there.bytes // 4 if there else 0)
        return method.image.stride <= room and self._can_announce(method.image.pool_copies)

    def _can_announce(self, more: Sequence[PoolCopies]) -> bool:
        # The source refuses an announcement that exceeds its limits, with all routes in it.
        parts = [*(part for gather in self.gathers for part in gather.parts), *more]
        copies, cells = sum(len(part.nests) for part in parts), sum(len(part.at) for part in parts)
        return copies <= self._max_strided_copies and cells <= MAX_CELLS

    def _both_sides(self, route: Route, method: TransferMethod) -> tuple[_Descriptors, _Descriptors]:
        src_blocks = route.src_stride, route.src_blocks
        dst_blocks = route.dst_stride, route.dst_blocks
        image = method.image
        if image is None:
            copies = [(one, one.descriptors) for one in route.cell_copies]
            return (
                _descriptors(((rows.src, rows.length, one.src_offsets) for one, rows in copies), *src_blocks),
                _descriptors(((rows.dst, rows.length, one.dst_offsets) for one, rows in copies), *dst_blocks),
            )
        landing, outgoing = self._landing.region, self._card.outgoing
        here = image.stride, landing.length // image.stride
        reads = [(part.descriptors, part.at) for part in image.reads]
        if method.strategy is Strategy.OVER_READ:
            return (
                _descriptors(((rows.src, rows.length, at) for rows, at in reads), *src_blocks),
                _descriptors(
                    ((rows.dst + landing.address, rows.length, ONE_CELL) for rows, _ in reads), *here
                ),
            )
        assert outgoing is not None  # noqa: S101 - `_is_possible` requires it
        there = image.stride, outgoing.bytes // image.stride
        if method.strategy is Strategy.SHARED:
            return _descriptors((), *there), _descriptors((), *there)
        if method.landing is not None:
            whole = np.array([image.bytes], np.int64)
            from_area, to_area = (
                [(np.array([at], np.int64), whole, ONE_CELL)] for at in (outgoing.address, landing.address)
            )
            return _descriptors(from_area, *there), _descriptors(to_area, *here)
        return (
            _descriptors(((rows.src + outgoing.address, rows.length, ONE_CELL) for rows, _ in reads), *there),
            _descriptors(((rows.dst, rows.length, at) for rows, at in reads), *dst_blocks),
        )

    def _prepare_method(
        self, route: Route, method: TransferMethod, src: _Descriptors, dst: _Descriptors
    ) -> PreparedMethod:
        announced, scatter = -1, None
        if method.scatters is not None:
            scatter = StagingCopies(method.scatters, self._space, "dst", route.dst_stride, route.dst_blocks)
        if _gathers(method) and (image := method.image) is not None:
            gather = GatherRoute(route.src_stride, route.src_blocks, image.stride, image.pool_copies)
            # Methods that differ only in what the reader does with the images share an announced route.
            if gather not in self.gathers:
                self.gathers.append(gather)
            announced = self.gathers.index(gather)
        shared = self._shared if method.strategy is Strategy.SHARED else None
        return PreparedMethod(
            method, src.rows, self.src.add(src), self.dst.add(dst), announced, scatter, shared
        )


def prepare_source(
    lane: LaneResources, card: RankCard, routes: Sequence[Route], made: ExitStack
) -> SourceRank:
    """Prepare reads from one rank. Mutates `made`, the stack of callbacks that undo the preparation."""
    geometry, there = lane.geometry, card.outgoing
    shared, not_shared = _map(there, geometry.regions[0])
    if shared is not None:
        made.callback(shared.close)
    verify = lane.settings.verify
    if verify and routes:
        _check_verifiable(card)
    preparation = _RoutePreparation(
        geometry, lane.landing, card, lane.settings.costs, shared=shared, verify=verify
    )
    for route in routes:
        preparation.add(route)
    client = None
    if preparation.gathers and there is not None:
        client = GatherClient(lane.context, there.host, there.port, preparation.gathers, lane.settings.keys)
        made.callback(client.close)
    name = lane.agent.add_peer(card.agent)
    made.callback(lane.agent.drop_peer, name)

    def listed(owner: str | None, region: Region, rows: Int64s) -> Any:
        handle = lane.agent.prepare(owner, region, rows)
        made.callback(lane.agent.release_list, handle)
        return handle

    src, dst, memory = preparation.src, preparation.dst, card.geometry.regions[0]
    local = listed(None, geometry.regions[0], dst.table()) if dst.entries else None
    remote = listed(name, memory, src.table()) if src.entries else None
    words = Region(card.words_address, card.words * WORD_BYTES)
    local_words = listed(None, lane.words_region, _word_rows(lane.words_region))
    remote_words = listed(name, words, _word_rows(words))
    speed = ReadSpeed(lane, name, memory, lane.settings.timed_read_bytes if src.entries else 0)
    made.callback(speed.close)
    lists = local, remote, local_words, remote_words
    return SourceRank(card, name, tuple(preparation.routes), *lists, client, speed, not_shared)


def _check_verifiable(card: RankCard) -> None:
    if card.outgoing is None:
        raise TransferError(
            "what is read from the peer cannot be verified, because its workers gather nothing; set "
            "staging_mib there, or leave verify_transfers out"
        )
    if any(region.memory != "DRAM" for region in card.geometry.regions):
        raise TransferError(
            "what is read from the peer cannot be verified, because its KV cache is in GPU memory; leave "
            "verify_transfers out"
        )


def _map(outgoing: Outgoing | None, like: Region) -> tuple[SharedArea | None, str]:
    """Map the outgoing file of a peer's rank; return None and the reason if that is not possible."""
    if outgoing is None or outgoing.file is None or outgoing.file.size != outgoing.bytes:
        return None, "the peer offers no memory that engines of its machine can map; its log says why"
    try:
        return SharedArea.map(outgoing.file, like), ""
    except TransferError as error:
        return None, str(error)


def _word_rows(region: Region) -> Int64s:
    return np.array([[region.address, WORD_BYTES, WORD_BYTES, region.length // WORD_BYTES]], np.int64)


def _gathers(method: TransferMethod) -> bool:
    return method.strategy in (Strategy.STAGED, Strategy.SHARED)  # the source packs the cells


def _clearing(route: Route, space: AddressSpace) -> StagingCopies:
    written = [
        PoolCopies(cell_copy.dst_offsets, tuple(copy.at(-copy.src, 0) for copy in cell_copy.copies))
        for cell_copy in route.cell_copies
    ]
    return StagingCopies(written, space, "dst", route.dst_stride, route.dst_blocks)


def page_clearings(rank: RankGeometry) -> tuple[tuple[int, StagingCopies], ...]:
    """Return pairs: index of a KV cache group, copies that zero the bytes of some of its layers in blocks.

    Together those of a group cover all its layers.
    """
    space = AddressSpace(rank.regions)
    # A rank's template against itself covers all fields of its pages.
    (itself,) = build_templates([rank], rank)
    return tuple((route.dst_group, _clearing(route, space)) for route in itself.routes)
