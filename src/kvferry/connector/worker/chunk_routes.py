"""One rank's part in storing and loading chunks: routes to and from an arena, and the copies over them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy.typing as npt
from numpy import uint8

from kvferry.connector.worker.orders import Piece, StoreOrder
from kvferry.errors import TransferError
from kvferry.geometry import RankGeometry
from kvferry.geometry.canonical import CanonicalForm, chunk_pool
from kvferry.memory.address_space import AddressSpace
from kvferry.memory.chunk_copies import ChunkCopies, offsets_of
from kvferry.planning.chunk_cells import cells_to_load, cells_to_store, unfilled_cells
from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import LoadSpan, partly_written_blocks
from kvferry.planning.template import Route, build_templates

_SLOTS = 1 << 20
"""More chunks than an order ever names; the pools that planning sees have no other meaning."""


def check_storable(canonical: CanonicalForm, ranks: Sequence[RankGeometry]) -> None:
    """Check that an engine's ranks fill chunks whole, and can be filled from them.

    Raises:
        Incompatible: they cannot; says which layers and why.
    """
    pools = _pools(canonical)
    for pool in pools:
        build_templates(ranks, pool)
    for rank in ranks:
        build_templates(pools, rank)


class ChunkRoutes:
    """One rank's copies between its blocks and the arena. Used by one thread.

    Every operation is over when it returns.
    """

    def __init__(
        self,
        canonical: CanonicalForm,
        ranks: Sequence[RankGeometry],
        place: tuple[int, int],
        memory: npt.NDArray[uint8],
    ) -> None:
        """Prepare.

        Args:
            canonical: what chunks are.
            ranks: all of the engine.
            place: (pp_rank, tp_rank) of this one; its addresses are this process's.
            memory: the arena, uint8 of shape (bytes,).

        Raises:
            Incompatible, TransferError: the cache has no such form.
        """
        self._canonical, self._memory = canonical, memory
        number = next(n for n, rank in enumerate(ranks) if (rank.pp_rank, rank.tp_rank) == place)
        self._rank = ranks[number]
        space = AddressSpace(self._rank.regions)

        def carried(route: Route, side: str) -> _Carried:
            return _Carried(route, ChunkCopies(route, side, space, memory))

        pools = _pools(canonical)
        self._out = [
            [carried(route, "src") for route in build_templates(ranks, pool)[number].routes] for pool in pools
        ]
        self._in = [
            [carried(route, "dst") for route in template.routes]
            for template in build_templates(pools, self._rank)
        ]

    def store(self, order: StoreOrder) -> tuple[int, ...]:
        """Copy this rank's part of chunks to the arena; returns bytes per canonical group.

        Raises:
            TransferError: the order names blocks that do not hold the tokens.
        """
        found = [0] * len(self._canonical.groups)
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
                for piece in {pieces[0], pieces[-1]}:
                    beside = unfilled_cells(each.route, tokens, piece.number, order.available)
                    each.copies.blank(beside, piece.offset)
        return tuple(found)

    def load(
        self, pieces: Sequence[Piece], span: LoadSpan, tables: Sequence[Int64s], *, first: bool
    ) -> tuple[int, ...]:
        """Copy this rank's part of chunks to its blocks; returns bytes per canonical group.

        Args:
            pieces: the chunks, by group, then by number.
            span: how much the whole load brings.
            tables: destination block ids by position, per group of the engine.
            first: no part of this load came before, so zero the blocks that it fills only in part.

        Raises:
            TransferError: the tables name blocks that cannot take the tokens.
        """
        found = [0] * len(self._canonical.groups)
        if first:
            self._clear(span, tables)
        for group, of_group in _by_group(pieces):
            numbers, offsets = [piece.number for piece in of_group], offsets_of([p.offset for p in of_group])
            for each in self._in[group]:
                route, here = each.route, self._rank.groups[each.route.dst_group]
                table, tokens = tables[route.dst_group], self._canonical.chunk_tokens
                for cells in cells_to_load(
                    route, tokens, group=here, span=span, numbers=numbers, table=table
                ):
                    each.copies.load(cells, offsets)
                    found[group] += len(cells) * route.cell_bytes
        return tuple(found)

    def _clear(self, span: LoadSpan, tables: Sequence[Int64s]) -> None:
        for routes in self._in:
            for each in routes:
                here = self._rank.groups[each.route.dst_group]
                table = tables[each.route.dst_group]
                each.copies.clear(
                    partly_written_blocks(each.route, here.kind, here.attention_span, span, table)
                )


@dataclass(frozen=True, slots=True)
class _Carried:
    """A route and what copies over it."""

    route: Route
    copies: ChunkCopies


def _pools(canonical: CanonicalForm) -> list[RankGeometry]:
    return [chunk_pool(canonical, number, 0, _SLOTS) for number in range(len(canonical.groups))]


def _by_group(pieces: Sequence[Piece]) -> Iterator[tuple[int, list[Piece]]]:
    found: dict[int, list[Piece]] = defaultdict(list)
    for piece in pieces:
        found[piece.group].append(piece)
    yield from found.items()
