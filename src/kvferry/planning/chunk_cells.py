"""Selection of the cells that a rank copies to store or load chunks, numbered by position in the prompt.

The other side of each selection is a buffer of chunks, whose block ids are positions that start at 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.geometry import Attention, GroupKind, GroupPattern, RankGeometry
from kvferry.geometry.canonical import CanonicalForm, chunk_pool
from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import (
    ALL_TOKENS,
    Cells,
    LoadSpan,
    check_part_edges,
    needed_tokens,
    select_cells,
)
from kvferry.planning.template import Route, build_templates

_STATE = Attention(GroupKind.STATE)

_SLOTS = 1 << 20
"""Number of chunks in the pools passed to the planner. Any number that no order exceeds will do."""


def chunk_pools(canonical: CanonicalForm) -> list[RankGeometry]:
    """Return a buffer of chunks of each KV cache group, as the planner describes the memory of a rank."""
    return [chunk_pool(canonical, number, 0, _SLOTS) for number in range(len(canonical.groups))]


def check_storable(canonical: CanonicalForm, ranks: Sequence[RankGeometry]) -> None:
    """Raise Incompatible unless some ranks together can store their share of chunks, and load it.

    `canonical` is the form of their share.
    """
    pools = chunk_pools(canonical)
    for pool in pools:
        build_templates(ranks, pool)
    for rank in ranks:
        build_templates(pools, rank)


@dataclass(frozen=True, slots=True)
class TableSlice:
    """The ids of a block table from position `first` on; in a state group, the block of the snapshot."""

    first: int
    ids: tuple[int, ...]

    def table(self) -> Int64s:
        """Return the block table to the end of this part, with null blocks before it, int64.

        >>> TableSlice(2, (7, 9)).table().tolist()
        [0, 0, 7, 9]
        """
        return np.array((0,) * self.first + self.ids, np.int64)


def slice_table(ids: Sequence[int], low: int, high: int, block_tokens: int) -> TableSlice:
    """Return the part of a block table whose blocks hold the tokens ``[low, high)``.

    >>> slice_table([5, 6, 7, 8], 100, 200, 64)
    TableSlice(first=1, ids=(6, 7, 8))
    """
    first = low // block_tokens
    return TableSlice(first, tuple(ids[first : -(-high // block_tokens)]))


def runs_of(numbers: Sequence[int]) -> list[range]:
    """Group ascending numbers into ranges.

    >>> runs_of([3, 4, 5, 9])
    [range(3, 6), range(9, 10)]
    """
    found: list[range] = []
    for number in numbers:
        if found and found[-1].stop == number:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


def _chunk_table(numbers: Sequence[int]) -> Int64s:
    """Return a block table for a buffer that holds these chunks of a prompt, int64 of shape (max + 1,).

    >>> _chunk_table([1, 3]).tolist()
    [0, 1, 0, 2]
    """
    table = np.zeros(max(numbers) + 1, np.int64)
    table[list(numbers)] = np.arange(1, len(numbers) + 1)
    return table


def cells_to_store(
    route: Route, chunk_tokens: int, numbers: Sequence[int], available: range, blocks: TableSlice
) -> list[Cells]:
    """Return the cells to copy from blocks into a buffer of chunks, per range of consecutive chunks.

    Args:
        numbers: chunks to store, ascending, in the order of the buffer; exactly one for a snapshot.
        available: prompt tokens whose content the blocks hold, from the start of a cell on. Cells without any
            of them are not copied. Unused for a snapshot.

    Raise TransferError if a block is missing, null or not in its pool, or `available` begins inside a cell.
    """
    if not route.cell_tokens:
        # Any load that is not empty transfers the one snapshot.
        return [select_cells(route, _STATE, LoadSpan(0, 1, 2), blocks.table(), np.ones(1, np.int64))]
    table, chunks, found = blocks.table(), _chunk_table(numbers), []
    for run in runs_of(numbers):
        high = min(run.stop * chunk_tokens, available.stop)
        part = LoadSpan(max(run.start * chunk_tokens, available.start), high, high)
        found.append(select_cells(route, ALL_TOKENS, part, table, chunks))
    return found


def cells_to_blank(route: Route, chunk_tokens: int, number: int, available: range) -> Int64s:
    """Return the `Cells.dst_number` of the cells of a chunk that must be cleared, int64 of shape (n,).

    The engine's blocks hold no tokens of them.
    """
    cell = route.cell_tokens
    if not cell:
        return np.zeros(0, np.int64)
    cells = np.arange(number * chunk_tokens // cell, (number + 1) * chunk_tokens // cell, dtype=np.int64)
    cells = cells[(cells < available.start // cell) | (cells >= -(-available.stop // cell))]
    # If ranks divide the cells of the chunk, each clears its own.
    return cells[route.src_interleave.holds(cells)]


def cells_to_load(
    route: Route,
    chunk_tokens: int,
    group: GroupPattern,
    span: LoadSpan,
    numbers: Sequence[int],
    table: Int64s,
) -> list[Cells]:
    """Return the cells to copy from a buffer of loaded chunks into blocks, per range of consecutive chunks.

    `numbers` are the chunks in the buffer, ascending: those of the load of `span`, or a part of them; one for
    a snapshot. Raise TransferError as `select_cells`, for the whole load.
    """
    if not route.cell_tokens:
        return [select_cells(route, group, span, np.ones(1, np.int64), table)]
    low, high = needed_tokens(group, span)
    # The selections below see only their own run of chunks, so the edges of the whole load are checked here.
    check_part_edges(route, group.kind, span)
    low = max(low // route.cell_tokens * route.cell_tokens, span.local_tokens)
    chunks, found = _chunk_table(numbers), []
    for run in runs_of(numbers):
        first, last = max(low, run.start * chunk_tokens), min(high, run.stop * chunk_tokens)
        part = LoadSpan(first, last, max(first, last))
        found.append(select_cells(route, ALL_TOKENS, part, chunks, table))
    return found
