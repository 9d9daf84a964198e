"""Copies between an engine's blocks and chunks in host memory: the loops of a route, one cell at a time.

The planner sees an arena as pools of chunks (`geometry.canonical.chunk_pool`) at address 0, so on that side
its nests are offsets in a chunk. A chunk may then lie anywhere in the arena: its view is made when it is
copied, which costs a microsecond; the engine's side, which is always the same, is made once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvferry.memory.space import Space, word_of
from kvferry.planning.nest import Nest
from kvferry.planning.pieces import Int64s
from kvferry.planning.select import Cells
from kvferry.planning.template import Route

_WORDS = {8: np.int64, 4: np.int32, 2: np.int16, 1: np.uint8}


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """One nest: the same elements in the engine's blocks and in a chunk.

    Attributes:
        blocks: (blocks, count of every loop, words of a run), an array on the host, else a tensor.
        offset: bytes from a chunk's start.
        shape, strides: of the view of a chunk, without blocks.
    """

    blocks: Any
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class ChunkCopies:
    """All cells of one route, on one rank.

    Every operation is over when it returns, on a device too. Blocks and chunks must stay whose they are
    until then.
    """

    def __init__(self, route: Route, side: str, engine: Space, memory: npt.NDArray[np.uint8]) -> None:
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
        self._phases = [
            [self._copy(nest, side, engine) for given in phase for nest in given.ascending()]
            for phase in route.nests
        ]

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
        for phase in cells.phase.tolist():
            for copy in self._phases[phase]:
                self._image(copy, offset)[...] = 0

    def clear(self, blocks: Int64s) -> None:
        """Zero what the route covers of these blocks, in every phase."""
        for copies in self._phases:
            for copy in copies:
                for block in blocks.tolist():
                    copy.blocks[block] = 0
        self._wait()

    def _each(self, cells: Cells, blocks: Int64s, chunks: Int64s) -> None:
        each = zip(cells.phase.tolist(), blocks.tolist(), chunks.tolist(), strict=True)
        for phase, block, chunk in each:
            for copy in self._phases[phase]:
                self._move(copy, block, chunk)
        self._wait()

    def _move(self, copy: _Copy, block: int, chunk: int) -> None:
        pages, image = copy.blocks[block], self._image(copy, chunk)
        if not isinstance(pages, np.ndarray):
            there = torch.from_numpy(image)
            there.copy_(pages) if self._storing else pages.copy_(there)
        elif self._storing:
            np.copyto(image, pages)
        else:
            np.copyto(pages, image)

    def _image(self, copy: _Copy, chunk: int) -> npt.NDArray[Any]:
        word = copy.strides[-1]
        return np.ndarray(copy.shape, _WORDS[word], self._memory.data, chunk + copy.offset, copy.strides)

    def _copy(self, nest: Nest, side: str, engine: Space) -> _Copy:
        address, offset = (nest.src, nest.dst) if self._storing else (nest.dst, nest.src)
        word = word_of(nest, self._stride, offset, address - engine.base(address))
        distances = [loop.dst if self._storing else loop.src for loop in nest.loops]
        blocks = engine.view(nest, side, self._stride, self._blocks, word)
        return _Copy(
            blocks if blocks.is_cuda else blocks.numpy(),
            offset,
            (*(loop.count for loop in nest.loops), nest.run // word),
            (*distances, word),
        )

    def _wait(self) -> None:
        """What others do next comes after this, though the engine uses other streams."""
        for copies in self._phases[:1]:
            for copy in copies[:1]:
                if not isinstance(copy.blocks, np.ndarray):
                    torch.cuda.synchronize(copy.blocks.device)


def offsets_of(offsets: Sequence[int]) -> Int64s:
    """Offsets of chunks as `store` and `load` take them; number 0 is the null chunk."""
    return np.array((0, *offsets), np.int64)
