"""Selection of the cells that a rank copies to store chunks of a prompt, or to load chunks of a prefix.

The functions call `select.select_cells` with a block table on one side and a chunk table on the other. Chunks
are numbered by position in the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.geometry import Attention, GroupKind, GroupPattern
from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import (
    ALL_TOKENS,
    Cells,
    LoadSpan,
    check_part_edges,
    needed_tokens,
    select_cells,
)
from kvferry.planning.template import Route

_STATE = Attention(GroupKind.STATE)


@dataclass(frozen=True, slots=True)
class TableSlice:
    """A contiguous part of a block table.

    Attributes:
        first: position of the first entry in the block table; 0 in a state group.
        ids: block ids from that position on; in a state group, the id of the one block with the snapshot.
    """

    first: int
    ids: tuple[int, ...]

    def table(self) -> Int64s:
        """Return the block table from its start to the end of this part, int64 of shape (first + len(ids),).

        Positions before `first` have 0, the id of the null block.

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
    """Group ascending numbers into ranges of consecutive numbers.

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


def chunk_table(numbers: Sequence[int]) -> Int64s:
    """Return a block table for a buffer of chunks, int64 of shape (max(numbers) + 1,).

    Entry ``n`` is 1 + the position of the prompt's chunk ``n`` in the buffer, or 0, the null block, if the
    buffer does not hold this chunk.

    >>> chunk_table([1, 3]).tolist()
    [0, 1, 0, 2]
    """
    table = np.zeros(max(numbers) + 1, np.int64)
    table[list(numbers)] = np.arange(1, len(numbers) + 1)
    return table


def cells_to_store(
    route: Route, chunk_tokens: int, numbers: Sequence[int], available: range, blocks: TableSlice
) -> list[Cells]:
    """Return the cells to copy from blocks into a buffer of chunks, per range of consecutive chunks.

    Destination block ids are positions in the buffer, starting at 1 (`chunk_table`).

    Args:
        numbers: indices in the prompt of the chunks to store, ascending, in the order of the buffer; exactly
            one for a snapshot.
        available: range of prompt tokens whose content the blocks hold, beginning at the start of a cell.
            Cells without any of these tokens are not copied. Unused for a snapshot.
        blocks: part of the source group's block table that contains the blocks with the chunks' tokens.

    Raises:
        TransferError: a block is missing, null or not in its pool; or `available` begins inside a cell.
    """
    if not route.cell_tokens:
        # Any load that is not empty transfers the one snapshot.
        return [select_cells(route, _STATE, LoadSpan(0, 1, 2), blocks.table(), np.ones(1, np.int64))]
    table, chunks, found = blocks.table(), chunk_table(numbers), []
    for run in runs_of(numbers):
        high = min(run.stop * chunk_tokens, available.stop)
        part = LoadSpan(max(run.start * chunk_tokens, available.start), high, high)
        found.append(select_cells(route, ALL_TOKENS, part, table, chunks))
    return found


def unfilled_cells(route: Route, chunk_tokens: int, number: int, available: range) -> Cells:
    """Return those cells of a chunk for which the engine's blocks hold no tokens; empty for a snapshot.

    Nothing is copied into these cells when the chunk is stored, so they must be cleared. All source block ids
    are 0. All destination block ids are 1, as if the chunk were the only one in its buffer.
    """
    cell = route.cell_tokens
    if not cell:
        return Cells(*(np.zeros(0, np.int64) for _ in range(3)))
    cells = np.arange(number * chunk_tokens // cell, (number + 1) * chunk_tokens // cell, dtype=np.int64)
    cells = cells[(cells < available.start // cell) | (cells >= -(-available.stop // cell))]
    return Cells(np.zeros(len(cells), np.int64), np.ones(len(cells), np.int64), cells)


def cells_to_load(
    route: Route,
    chunk_tokens: int,
    group: GroupPattern,
    span: LoadSpan,
    numbers: Sequence[int],
    table: Int64s,
) -> list[Cells]:
    """Return the cells to copy from a buffer of loaded chunks into blocks, per range of consecutive chunks.

    Source block ids are positions in the buffer, starting at 1 (`chunk_table`).

    Args:
        span: tokens of the whole load.
        numbers: indices in the prompt of the chunks in the buffer, ascending. The buffer may hold only a part
            of the load's chunks; for a snapshot, exactly one.
        table: block ids of the destination group by position, int64 of shape (blocks,).

    Raises:
        TransferError: a block is missing, null or not in its pool; or the prefix that the engine already has
            ends inside a cell; or the load is a part of a prefix, and begins or ends inside a block that the
            adjacent part also writes.
    """
    if not route.cell_tokens:
        return [select_cells(route, group, span, np.ones(1, np.int64), table)]
    low, high = needed_tokens(group, span)
    # The selections below see only their own run of chunks, so the edges of the whole load are checked here.
    check_part_edges(route, group.kind, span)
    low = max(low // route.cell_tokens * route.cell_tokens, span.local_tokens)
    chunks, found = chunk_table(numbers), []
    for run in runs_of(numbers):
        first, last = max(low, run.start * chunk_tokens), min(high, run.stop * chunk_tokens)
        part = LoadSpan(first, last, max(first, last))
        found.append(select_cells(route, ALL_TOKENS, part, chunks, table))
    return found
