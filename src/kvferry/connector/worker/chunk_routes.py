"""One rank's part in storing and loading chunks: the copies between its KV blocks and the arena.

A `Route` describes how the bytes of one KV cache group map between a rank's blocks and the chunk format. Its
cells are a number of tokens that divides both the size of a block and the size of a chunk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy.typing as npt
from numpy import uint8

from kvferry.connector.worker.orders import Piece, StoreOrder
from kvferry.errors import TransferError
from kvferry.geometry import RankGeometry
from kvferry.geometry.canonical import CanonicalForm, chunk_pool
from kvferry.memory.address_space import AddressSpace
from kvferry.memory.chunk_copies import ChunkCopies, offsets_of
from kvferry.memory.device_stream import DeviceEvent, wait_event
from kvferry.planning.chunk_cells import cells_to_load, cells_to_store, unfilled_cells
from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import LoadSpan, partly_written_blocks
from kvferry.planning.strategy import COPY_ENGINE_BYTES
from kvferry.planning.template import Route, build_templates

_SLOTS = 1 << 20
"""Number of chunks in the pools passed to the planner. Any number that no order exceeds will do."""


def check_storable(canonical: CanonicalForm, ranks: Sequence[RankGeometry]) -> None:
    """Check that all ranks of an engine together can store whole chunks, and can load their KV from chunks.

    Raises:
        Incompatible: some layers cannot be stored or loaded. The message names them and the reasons.
    """
    pools = _pools(canonical)
    for pool in pools:
        build_templates(ranks, pool)
    for rank in ranks:
        build_templates(pools, rank)


class ChunkRoutes:
    """Copies chunks between one rank's KV blocks and the arena.

    Only one thread may use it. Every method returns only when its copies are complete.
    """

    def __init__(
        self,
        canonical: CanonicalForm,
        ranks: Sequence[RankGeometry],
        rank_coordinates: tuple[int, int],
        memory: npt.NDArray[uint8],
        *,
        engine_bytes: int = COPY_ENGINE_BYTES,
    ) -> None:
        """Prepare the copies between this rank's KV blocks and the arena.

        Args:
            canonical: format in which chunks are stored.
            ranks: geometry of every rank of the engine.
            rank_coordinates: (pp_rank, tp_rank) of the rank in this process; it must be in `ranks`.
            memory: the arena, uint8 of shape (bytes,). If the blocks are on a GPU, it must be registered with
                CUDA.
            engine_bytes: run length in bytes from which the GPU's copy engine copies instead of a kernel.

        Raises:
            Incompatible: some layers cannot be stored in the format or loaded from it.
            TransferError: the layout describes bytes outside this rank's registered memory.
        """
        self._canonical, self._memory = canonical, memory
        number = next(n for n, rank in enumerate(ranks) if (rank.pp_rank, rank.tp_rank) == rank_coordinates)
        self._rank = ranks[number]
        space = AddressSpace(self._rank.regions)

        def copier(route: Route, side: str) -> RouteCopier:
            return RouteCopier(route, ChunkCopies(route, side, space, memory, engine_bytes))

        pools = _pools(canonical)
        self._out = [
            [copier(route, "src") for route in build_templates(ranks, pool)[number].routes] for pool in pools
        ]
        self._in = [
            [copier(route, "dst") for route in template.routes]
            for template in build_templates(pools, self._rank)
        ]

    def store(self, order: StoreOrder, computed: DeviceEvent | None = None) -> tuple[int, ...]:
        """Copy this rank's part of each chunk from its KV blocks to the arena.

        Args:
            order: chunks to store.
            computed: event of the GPU after which the blocks hold their KV; None if they hold it already.

        Returns:
            Number of bytes copied, per KV cache group of the storage format.

        Raises:
            TransferError: the order names blocks that do not hold the tokens.
        """
        found = [0] * len(self._canonical.groups)
        wait_event(self._rank.regions[0], computed)
        with self._awaited(self._out):
            for group, pieces in _by_group(order.pieces):
                numbers, offsets = [piece.number for piece in pieces], offsets_of([p.offset for p in pieces])
                for each in self._out[group]:
                    blocks = order.tables[each.route.src_group]
                    if blocks is None:
                        raise TransferError(
                            f"a store of group {each.route.src_group} has no block table of it; expected one"
                        )
                    tokens = self._canonical.chunk_tokens
                    for cells in cells_to_store(each.route, tokens, numbers, order.available, blocks):
                        each.copies.store(cells, offsets)
                        found[group] += len(cells) * each.route.cell_bytes
                    # Only the first and the last chunk can begin or end outside the available tokens. Slots
                    # are reused, so the rest would hold bytes of another chunk.
                    for piece in {pieces[0], pieces[-1]}:
                        beside = unfilled_cells(each.route, tokens, piece.number, order.available)
                        each.copies.blank(beside, piece.offset)
        return tuple(found)

    def load(
        self, pieces: Sequence[Piece], span: LoadSpan, tables: Sequence[Int64s], *, first: bool
    ) -> tuple[int, ...]:
        """Copy this rank's part of each chunk from the arena to its KV blocks.

        Args:
            pieces: chunks to copy, sorted by `Piece.group`, then by `Piece.number`.
            span: range of prompt tokens of the whole load.
            tables: destination block table of each KV cache group, int64, indexed by block position.
            first: True for the first part of the load: blocks that the load fills only partly are zeroed
                before.

        Returns:
            Number of bytes copied, per KV cache group of the storage format.

        Raises:
            TransferError: the tables name blocks that cannot hold the tokens.
        """
        found = [0] * len(self._canonical.groups)
        with self._awaited(self._in):
            if first:
                self._clear(span, tables)
            for group, of_group in _by_group(pieces):
                numbers, offsets = (
                    [piece.number for piece in of_group],
                    offsets_of([p.offset for p in of_group]),
                )
                for each in self._in[group]:
                    route, here = each.route, self._rank.groups[each.route.dst_group]
                    table, tokens = tables[route.dst_group], self._canonical.chunk_tokens
                    for cells in cells_to_load(
                        route, tokens, group=here, span=span, numbers=numbers, table=table
                    ):
                        each.copies.load(cells, offsets)
                        found[group] += len(cells) * route.cell_bytes
        return tuple(found)

    @contextmanager
    def _awaited(self, routes: Sequence[Sequence[RouteCopier]]) -> Iterator[None]:
        """Wait at the end for all copies that were queued meanwhile, also if an error ends the block."""
        try:
            yield
        finally:
            for each in [each for of_group in routes for each in of_group][:1]:
                # After an error, the engine may use the blocks and the arena for something else. All routes
                # queue on the thread's stream, so waiting on one is enough.
                each.copies.wait()

    def _clear(self, span: LoadSpan, tables: Sequence[Int64s]) -> None:
        for routes in self._in:
            for each in routes:
                here = self._rank.groups[each.route.dst_group]
                table = tables[each.route.dst_group]
                each.copies.clear(partly_written_blocks(each.route, here, span, table))


@dataclass(frozen=True, slots=True)
class RouteCopier:
    """A route, and the object that copies bytes along it."""

    route: Route
    copies: ChunkCopies


def _pools(canonical: CanonicalForm) -> list[RankGeometry]:
    return [chunk_pool(canonical, number, 0, _SLOTS) for number in range(len(canonical.groups))]


def _by_group(pieces: Sequence[Piece]) -> Iterator[tuple[int, list[Piece]]]:
    found: dict[int, list[Piece]] = defaultdict(list)
    for piece in pieces:
        found[piece.group].append(piece)
    yield from found.items()
