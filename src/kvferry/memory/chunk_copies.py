"""Copy cells between an engine's blocks and chunks in host memory.

The planner treats an arena as a pool of chunks at address 0 (`geometry.canonical.chunk_pool`), so on that
side its copies have offsets in a chunk. A chunk may lie anywhere in the arena, so its view is created for
each copy, which takes a microsecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvferry.memory.address_space import AddressSpace
from kvferry.memory.pool_cells import CopyView, PoolCells
from kvferry.planning.cell_copy import CellCopy, PoolCopies
from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import Cells
from kvferry.planning.template import Route

_WORDS = {8: np.int64, 4: np.int32, 2: np.int16, 1: np.uint8}


class ChunkCopies:
    """Copies of a route's cells between the blocks of one rank and chunks in an arena.

    A copy is complete when the method returns, also on a device. Until then blocks and chunks must not be
    reused.
    """

    def __init__(self, route: Route, side: str, engine: AddressSpace, memory: npt.NDArray[np.uint8]) -> None:
        """Create the views of the engine's memory.

        Args:
            route: one side is an engine's rank, the other a pool of chunks at address 0.
            side: the engine's side: "src" to store, "dst" to load.
            engine: registered memory of the engine.
            memory: the arena, uint8 of shape (bytes,).

        Raises:
            TransferError: the route exceeds the engine's memory.
        """
        self._storing, self._memory = side == "src", memory
        stride = route.src_stride if self._storing else route.dst_stride
        blocks = route.src_blocks if self._storing else route.dst_blocks
        # Bytes from the start of a chunk to each of its cells, for each part of the route.
        self._chunk_cells = [
            part.dst_offsets if self._storing else part.src_offsets for part in route.cell_copies
        ]
        alignments = [gcd(*cells.tolist()) for cells in self._chunk_cells]
        parts = [self._engine_side(part) for part in route.cell_copies]
        self._pool = PoolCells(parts, engine, side=side, stride=stride, blocks=blocks, alignments=alignments)

    def store(self, cells: Cells, offsets: Int64s) -> None:
        """Copy cells from blocks to chunks.

        Args:
            cells: cells of the route; `dst_block` indexes `offsets`.
            offsets: bytes from the start of the arena to each chunk, int64 of shape (n,).
        """
        self._copy(cells, cells.src_block, offsets[cells.dst_block])

    def load(self, cells: Cells, offsets: Int64s) -> None:
        """Copy cells from chunks to blocks; arguments as of `store`, but `src_block` indexes `offsets`."""
        self._copy(cells, cells.dst_block, offsets[cells.src_block])

    def blank(self, cells: Cells, offset: int) -> None:
        """Zero some cells of the chunk at byte `offset` of the arena."""
        for part, chunk_cells in zip(self._pool.parts, self._chunk_cells, strict=True):
            for at in _offsets(chunk_cells, offset, cells.number):
                for view in part.copies:
                    self._packed(view, at)[...] = 0

    def clear(self, blocks: Int64s) -> None:
        """Zero the bytes that the route covers, in all cells of these blocks."""
        self._pool.clear(blocks)

    def _copy(self, cells: Cells, blocks: Int64s, chunks: Int64s) -> None:
        for part, chunk_cells in zip(self._pool.parts, self._chunk_cells, strict=True):
            places: list[int] = part.places(blocks, cells.number).tolist()
            for place, offset in zip(places, _offsets(chunk_cells, chunks, cells.number), strict=True):
                for view in part.copies:
                    self._move(view, place, offset)
        self._pool.wait()

    def _move(self, view: CopyView, place: int, offset: int) -> None:
        """Run one strided copy of one cell in the direction of this route."""
        pages, packed = view.elements[place], self._packed(view, offset)
        if not view.on_host:
            there = torch.from_numpy(packed)
            there.copy_(pages) if self._storing else pages.copy_(there)
        elif self._storing:
            np.copyto(packed, pages)
        else:
            np.copyto(pages, packed)

    def _packed(self, view: CopyView, offset: int) -> npt.NDArray[Any]:
        """Return the chunk-side view of a strided copy, for the cell at byte `offset` of the arena."""
        return np.ndarray(
            view.shape, _WORDS[view.word], self._memory.data, offset + view.offset, view.strides
        )

    def _engine_side(self, part: CellCopy) -> PoolCopies:
        """Return the copies between blocks and chunks with non-negative strides, as views require."""
        at = part.src_at if self._storing else part.dst_at
        return PoolCopies(at, tuple(copy for one in part.nests for copy in one.ascending()))


def _offsets(chunk_cells: Int64s, chunks: Int64s | int, number: Int64s) -> list[int]:
    """Return byte offsets of cells in the arena; `chunks` are the offsets of their chunks."""
    found: list[int] = (chunks + chunk_cells[number % len(chunk_cells)]).tolist()
    return found


def offsets_of(offsets: Sequence[int]) -> Int64s:
    """Return offsets of chunks for `store` and `load`; index 0 is the null chunk."""
    return np.array((0, *offsets), np.int64)
