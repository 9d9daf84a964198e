"""Chunks are cut by size, and several of them find room in the areas."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.planning.packed_image import PackedImage
from kvferry.planning.prepared_lists import PreparedEntries
from kvferry.planning.select import Cells
from kvferry.planning.strategy import Strategy, TransferMethod, Work
from kvferry.transport.prepared_routes import PreparedMethod

STRIDE = 1 << 20


def _way(room: int, gather: int = 0, rows: int = 3, cells: int = 1) -> PreparedMethod:
    method = TransferMethod(Strategy.STAGED, Work(1, STRIDE), PackedImage(STRIDE, (), ()))
    return PreparedMethod(method, rows, PreparedEntries(100, room), PreparedEntries(7, 1000, cells), gather)


def _cells(count: int) -> Cells:
    blocks = np.arange(1, count + 1, dtype=np.int64)
    return Cells(blocks, blocks[::-1], blocks + 5, blocks + 5)


@pytest.mark.parametrize(
    ("count", "room", "sizes"),
    [(64, 64, [16] * 4), (64, 20, [5] * 12 + [4]), (3, 64, [2, 1]), (2, 2, [1, 1])],
)
def test_chunks_are_a_quarter_of_what_moves_and_of_the_room(count: int, room: int, sizes: list[int]) -> None:
    assert [len(chunk) for chunk in _way(room).segments(_cells(count))] == sizes


@pytest.mark.parametrize(("bytes_per_cell", "sizes"), [(STRIDE, [4, 4, 2]), (3 << 20, [1] * 10)])
def test_cells_that_are_verified_are_read_directly_in_segments(bytes_per_cell: int, sizes: list[int]) -> None:
    method = TransferMethod(Strategy.DIRECT, Work(3, bytes_per_cell, bytes=bytes_per_cell))
    direct = PreparedMethod(method, 3, PreparedEntries(100, 64), PreparedEntries(7, 64))
    assert [len(segment) for segment in direct.segments(_cells(10))] == sizes


def test_together_they_are_all_cells_in_order() -> None:
    cells = _cells(50)
    chunks = _way(64).segments(cells)
    assert np.concatenate([chunk.dst_block for chunk in chunks]).tolist() == cells.dst_block.tolist()


def test_entries_are_row_by_row_from_where_the_images_lie() -> None:
    found = _way(64).indices(_cells(2), 5, 0)
    assert found.src.tolist() == [105, 106, 169, 170, 233, 234]
    assert found.dst.tolist() == [9, 8, 1009, 1008, 2009, 2008]


def test_entries_of_blocks_are_those_of_their_cells() -> None:
    found = _way(64, rows=2, cells=3).indices(_cells(4), 0, 0)
    places = [(block, number % 3) for block, number in zip((4, 3, 2, 1), (6, 7, 8, 9), strict=True)]
    assert found.dst.tolist() == [
        7 + (row * 3 + cell) * 1000 + block for row in range(2) for block, cell in places
    ]
    assert found.src.dtype == found.dst.dtype == np.int32
