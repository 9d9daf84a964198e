"""Copies between an engine's blocks and chunks in host memory: the loops of a route, one cell at a time.

The planner sees an arena as pools of chunks (`geometry.canonical.chunk_pool`) at address 0, so on that side
its nests are offsets in a chunk. A chunk may then lie anywhere in the arena: its view is made when it is
copied, which costs a microsecond; the engine's side, which is always the same, is made once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvferry.memory.address_space import AddressSpace, largest_word
from kvferry.planning.cell_copy import CellCopy
from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import Cells
from kvferry.planning.strided_copy import StridedCopy
from kvferry.planning.template import Route

_WORDS = {8: np.int64, 4: np.int32, 2: np.int16, 1: np.uint8}


@dataclass(frozen=True, slots=True, eq=False)
class _NestCopy:
    """One nest: the same elements in the engine's blocks and in a chunk.

    Attributes:
        blocks: (places where a cell may begin, count of every loop, words of a run), an array on the host,
            else a tensor.
        offset: bytes from where a cell of a chunk begins.
        shape, strides: of the view of a cell of a chunk.
    """

    blocks: Any
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _PlaneCopies:
    """Nests whose cells lie alike in blocks, and alike in chunks.

    Attributes:
        block, cells: distance between the engine's blocks, and from the first cell of a block to each, in
            places of `_NestCopy.blocks`.
        chunk_cells: bytes from the start of a chunk to each of its cells.
        copies: its nests.
    """

    block: int
    cells: Int64s
    chunk_cells: Int64s
    copies: tuple[_NestCopy, ...]

    def places(self, blocks: Int64s, number: Int64s) -> list[int]:
        """Return the places of cells in the engine's blocks."""
        found: list[int] = (blocks * self.block + self.cells[number % len(self.cells)]).reshape(-1).tolist()
        return found

    def offsets(self, chunks: Int64s | int, number: Int64s) -> list[int]:
        """Return byte offsets of cells in the arena; `chunks` are the offsets of their chunks."""
        found: list[int] = (chunks + self.chunk_cells[number % len(self.chunk_cells)]).tolist()
        return found


class ChunkCopies:
    """All cells of one route, on one rank.

    Every operation is over when it returns, on a device too. Blocks and chunks must stay whose they are
    until then.
    """

    def __init__(self, route: Route, side: str, engine: AddressSpace, memory: npt.NDArray[np.uint8]) -> None:
        """Prepare.

        Args:
            route: one side is an engine's rank, the other a pool of chunks at address 0.
            side: which one the engine is: "src" to store, "dst" to load.
            engine: its registered memory.
            memory: the arena, uint8 of shape (bytes,).

        Raises:
            TransferError: the route leaves the engine's memory.
        """
        self._storing, self._memory = side == "src", memory
        self._stride = route.src_stride if self._storing else route.dst_stride
        self._blocks = route.src_blocks if self._storing else route.dst_blocks
        self._planes = [self._plane(cell_copy, side, engine) for cell_copy in route.cell_copies]

    def store(self, cells: Cells, offsets: Int64s) -> None:
        """Copy cells from blocks to chunks.

        Args:
            cells: of the route; `dst_block` indexes `offsets`.
            offsets: bytes from the start of the arena to each chunk, int64 of shape (n,).
        """
        self._each(cells, cells.src_block, offsets[cells.dst_block])

    def load(self, cells: Cells, offsets: Int64s) -> None:
        """Copy cells from chunks to blocks; as `store`, with `src_block` as the index."""
        self._each(cells, cells.dst_block, offsets[cells.src_block])

    def blank(self, cells: Cells, offset: int) -> None:
        """Zero cells of the chunk at `offset`."""
        for cell_copy in self._planes:
            for at in cell_copy.offsets(offset, cells.number):
                for copy in cell_copy.copies:
                    self._image(copy, at)[...] = 0

    def clear(self, blocks: Int64s) -> None:
        """Zero what the route covers of all cells of these blocks."""
        for cell_copy in self._planes:
            places = cell_copy.places(blocks[:, None], np.arange(len(cell_copy.cells)))
            for copy in cell_copy.copies:
                for place in places:
                    copy.blocks[place] = 0
        self._wait()

    def _each(self, cells: Cells, blocks: Int64s, chunks: Int64s) -> None:
        for cell_copy in self._planes:
            places, offsets = cell_copy.places(blocks, cells.number), cell_copy.offsets(chunks, cells.number)
            for place, offset in zip(places, offsets, strict=True):
                for copy in cell_copy.copies:
                    self._move(copy, place, offset)
        self._wait()

    def _move(self, copy: _NestCopy, place: int, offset: int) -> None:
        pages, image = copy.blocks[place], self._image(copy, offset)
        if not isinstance(pages, np.ndarray):
            there = torch.from_numpy(image)
            there.copy_(pages) if self._storing else pages.copy_(there)
        elif self._storing:
            np.copyto(image, pages)
        else:
            np.copyto(pages, image)

    def _image(self, copy: _NestCopy, offset: int) -> npt.NDArray[Any]:
        word = copy.strides[-1]
        return np.ndarray(copy.shape, _WORDS[word], self._memory.data, offset + copy.offset, copy.strides)

    def _plane(self, cell_copy: CellCopy, side: str, engine: AddressSpace) -> _PlaneCopies:
        here, there = (
            (cell_copy.src_offsets, cell_copy.dst_offsets)
            if self._storing
            else (cell_copy.dst_offsets, cell_copy.src_offsets)
        )
        unit = gcd(self._stride, *here.tolist())
        count = ((self._blocks - 1) * self._stride + int(here.max())) // unit + 1
        apart = gcd(unit, *there.tolist())
        copies = [
            self._copy(nest, engine, side, (unit, count), apart)
            for given in cell_copy.nests
            for nest in given.ascending()
        ]
        return _PlaneCopies(self._stride // unit, here // unit, there, tuple(copies))

    def _copy(
        self, nest: StridedCopy, engine: AddressSpace, side: str, places: tuple[int, int], apart: int
    ) -> _NestCopy:
        """A nest.

        Args:
            nest, engine, side: as given.
            places: bytes from one place where a cell may begin to the next, and how many there are.
            apart: divides the distances of cells on both sides.
        """
        address, offset = (nest.src, nest.dst) if self._storing else (nest.dst, nest.src)
        word = largest_word(nest, apart, offset, address - engine.base(address))
        distances = [loop.dst if self._storing else loop.src for loop in nest.loops]
        blocks = engine.view(nest, side, *places, word)
        return _NestCopy(
            blocks if blocks.is_cuda else blocks.numpy(),
            offset,
            (*(loop.count for loop in nest.loops), nest.run // word),
            (*distances, word),
        )

    def _wait(self) -> None:
        """Wait until the copies are done: the engine uses other streams."""
        for cell_copy in self._planes[:1]:
            for copy in cell_copy.copies[:1]:
                if not isinstance(copy.blocks, np.ndarray):
                    torch.cuda.synchronize(copy.blocks.device)


def offsets_of(offsets: Sequence[int]) -> Int64s:
    """Return offsets of chunks as `store` and `load` take them; index 0 is the null chunk."""
    return np.array((0, *offsets), np.int64)
