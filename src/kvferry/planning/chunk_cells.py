"""Selection of the cells that a rank copies to store chunks of a prompt, or to load chunks of a prefix.

A *chunk* holds a fixed number of tokens of one KV cache group, or one snapshot of recurrent state. A *cell*
is the part of a block that is copied as one unit. The functions call `select.select_cells` with a block table
on one side and a chunk table on the other. Chunks are numbered by position in the prompt. Entry ``number`` of
a chunk table is 1 + the index of the chunk in the buffer, or 0 if the buffer does not hold the chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.geometry import GroupKind
from kvferry.planning.coverage import GroupPattern
from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import Cells, LoadSpan, check_part_edges, needed_tokens, select_cells
from kvferry.planning.template import Route


@dataclass(frozen=True, slots=True)
class TableSlice:
    """A contiguous part of a block table (the block ids of a KV cache group, by position in the prompt).

    Attributes:
        first: position of the first entry in the block table; 0 in a state group.
        ids: block ids from that position on. In a state group, the id of the one block with the snapshot
            (recurrent state at one position).
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

    Args:
        ids: block table (block ids by position).
        low, high: first token, and token after the last, counted from the start of the prompt.
        block_tokens: number of tokens per block.
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
    """Return a block table for a buffer of chunks, in which each chunk is a block.

    >>> chunk_table([1, 3]).tolist()
    [0, 1, 0, 2]

    Args:
        numbers: index in the prompt of each chunk, in the order in which the buffer holds the chunks; at
            least one.

    Returns:
        Table, int64 of shape (max(numbers) + 1,). Entry ``n`` is 1 + the position in the buffer of the
        prompt's chunk ``n``, or 0 (the id of the null block) if the buffer does not hold this chunk.
    """
    table = np.zeros(max(numbers) + 1, np.int64)
    table[list(numbers)] = np.arange(1, len(numbers) + 1)
    return table


def cells_to_store(
    route: Route, chunk_tokens: int, numbers: Sequence[int], available: range, blocks: TableSlice
) -> list[Cells]:
    """Return the cells to copy from an engine's blocks into a buffer of chunks.

    A cell is the part of a block that is copied as one unit. There is one `Cells` object per range of
    consecutive chunks. Its destination block ids are positions in the buffer, starting at 1 (`chunk_table`).

    Args:
        route: set of layers to copy, from a rank's blocks to a pool of chunks.
        chunk_tokens: number of tokens per chunk.
        numbers: indices in the prompt of the chunks to store, ascending, in the order of the buffer. For a
            snapshot (recurrent state at one position), exactly one index.
        available: range of prompt tokens whose content the blocks hold. The range must begin at the start of
            a cell. Cells without any of these tokens are not copied. Unused for a snapshot.
        blocks: part of the source group's block table that contains the blocks with the chunks' tokens.

    Raises:
        TransferError: a block is missing, null or not in its pool; or `available` begins inside a cell.
    """
    if not route.cell_tokens:
        one = LoadSpan(0, 1, 2)
        return [
            select_cells(
                route,
                GroupKind.STATE,
                attention_span=0,
                span=one,
                src_table=blocks.table(),
                dst_table=np.ones(1, np.int64),
            )
        ]
    table, chunks, found = blocks.table(), chunk_table(numbers), []
    for run in runs_of(numbers):
        high = min(run.stop * chunk_tokens, available.stop)
        part = LoadSpan(max(run.start * chunk_tokens, available.start), high, high)
        found.append(
            select_cells(
                route, GroupKind.FULL, attention_span=0, span=part, src_table=table, dst_table=chunks
            )
        )
    return found


def unfilled_cells(route: Route, chunk_tokens: int, number: int, available: range) -> Cells:
    """Return those cells of a chunk for which the engine's blocks hold no tokens.

    A cell is the part of a block that is copied as one unit. Nothing is copied into these cells when the
    chunk is stored, so they must be cleared. In the result, all source block ids are 0 (no block is read).
    All destination block ids are 1, as if the chunk were the only one in its buffer. The result is empty for
    a snapshot (recurrent state at one position).

    Args:
        route: set of layers to copy, from a rank's blocks to a pool of chunks.
        chunk_tokens: number of tokens per chunk.
        number: index of the chunk in the prompt.
        available: range of prompt tokens whose content the blocks hold.
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
    """Return the cells to copy from a buffer of loaded chunks into an engine's blocks.

    A cell is the part of a block that is copied as one unit. There is one `Cells` object per range of
    consecutive chunks. Its source block ids are positions in the buffer, starting at 1 (`chunk_table`).

    Args:
        route: set of layers to copy, from a pool of chunks to a rank's blocks.
        chunk_tokens: number of tokens per chunk.
        group: attention pattern of the KV cache group that the chunks are loaded into.
        span: tokens of the whole load.
        numbers: indices in the prompt of the chunks in the buffer, ascending. The buffer may hold only a part
            of the load's chunks. For a snapshot (recurrent state at one position), exactly one index.
        table: block ids of the destination group by position, int64 of shape (blocks,).

    Raises:
        TransferError: a block is missing, null or not in its pool; or the prefix that the engine already has
            ends inside a cell; or the load is a part of a prefix, and begins or ends inside a block that the
            adjacent part also writes.
    """
    if not route.cell_tokens:
        return [
            select_cells(
                route,
                group.kind,
                attention_span=group.attention_span,
                span=span,
                src_table=np.ones(1, np.int64),
                dst_table=table,
            )
        ]
    low, high = needed_tokens(group.kind, group.attention_span, span)
    check_part_edges(route, group.kind, span)
    low = max(low // route.cell_tokens * route.cell_tokens, span.local_tokens)
    chunks, found = chunk_table(numbers), []
    for run in runs_of(numbers):
        first, last = max(low, run.start * chunk_tokens), min(high, run.stop * chunk_tokens)
        part = LoadSpan(first, last, max(first, last))
        found.append(
            select_cells(
                route, GroupKind.FULL, attention_span=0, span=part, src_table=chunks, dst_table=table
            )
        )
    return found
