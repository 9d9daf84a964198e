"""The cells of a pool's blocks as strided views: the engine's side of every copy.

Cells with the same strided copies differ only in their start. So each strided copy has one view of the pool,
whose first axis counts the *places* at which a cell may begin, and a copy indexes that axis. Runs are never
listed: a transposed interior, with runs of one element, is an ordinary copy between two strided views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
import torch

from kvferry.memory.address_space import AddressSpace, largest_word
from kvferry.planning.cell_copy import PoolCopies
from kvferry.planning.descriptors import Int64s
from kvferry.planning.strided_copy import StridedCopy


@dataclass(frozen=True, slots=True, eq=False)
class CopyView:
    """The view of a strided copy, at all places of the pool where a cell may begin.

    Attributes:
        copy: the strided copy.
        word: bytes of an element of `elements`.
        elements: the view, of shape (places, count of every loop, words of a run); an array on the host, a
            tensor on a device.
        offset: bytes from the start of a cell's image, or of a chunk's cell, to the first run.
        shape, strides: shape (count of every loop, words of a run) and strides in bytes of the runs in the
            image.
    """

    copy: StridedCopy
    word: int
    elements: Any
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def on_host(self) -> bool:
        """True if numpy can copy the elements."""
        return isinstance(self.elements, np.ndarray)


@dataclass(frozen=True, slots=True, eq=False)
class CellViews:
    """Cells that have the same strided copies.

    Attributes:
        block_places: places from one block to the next.
        cell_places: places from the start of a block to each of its cells, int64 of shape (cells,).
        copies: one view for each strided copy.
    """

    block_places: int
    cell_places: Int64s
    copies: tuple[CopyView, ...]

    def places(self, blocks: Int64s, numbers: Int64s) -> Int64s:
        """Return the places of cells.

        Args:
            blocks: block id of each cell, int64.
            numbers: number of each cell in its sequence, int64; broadcast with `blocks`.
        """
        return blocks * self.block_places + self.cell_places[numbers % len(self.cell_places)]


class PoolCells:
    """All cells of a pool. Views are created once. Operations return when the copy is complete.

    Attributes:
        parts: cells with the same strided copies, in the order given.
    """

    def __init__(
        self,
        parts: Sequence[PoolCopies],
        pool: AddressSpace,
        *,
        side: str,
        stride: int,
        blocks: int,
        alignments: Sequence[int] = (),
    ) -> None:
        """Create the views.

        Args:
            parts: strided copies of a cell. On the pool's side they have absolute addresses of block 0; on
                the other side they have offsets in an image or a chunk.
            pool: registered memory of the blocks.
            side: the side that lies in the pool, "src" or "dst".
            stride: bytes from one block to the next.
            blocks: number of blocks.
            alignments: for each part, a number of bytes that divides the distances between cells on the other
                side; by default whole words.

        Raises:
            TransferError: the copies exceed the pool's memory.
        """
        self._pool, self._side, self._stride, self._blocks = pool, side, stride, blocks
        self.parts = tuple(map(self._part, parts, alignments or [0] * len(parts)))

    def clear(self, blocks: Int64s) -> None:
        """Zero the bytes that the copies cover, in all cells of these blocks."""
        for part in self.parts:
            places = part.places(blocks[:, None], np.arange(len(part.cell_places))).reshape(-1).tolist()
            for view in part.copies:
                for place in places:
                    view.elements[place] = 0
        self.wait()

    def wait(self) -> None:
        """Wait for copies on a device, because the transport and the engine use other streams."""
        for part in self.parts[:1]:
            for view in part.copies[:1]:
                if not view.on_host:
                    torch.cuda.synchronize(view.elements.device)

    def _part(self, part: PoolCopies, alignment: int) -> CellViews:
        unit = gcd(self._stride, *part.at)
        count = ((self._blocks - 1) * self._stride + max(part.at)) // unit + 1
        views = tuple(self._view(copy, (unit, count), gcd(unit, alignment)) for copy in part.nests)
        return CellViews(self._stride // unit, np.array(part.at, np.int64) // unit, views)

    def _view(self, copy: StridedCopy, places: tuple[int, int], alignment: int) -> CopyView:
        """Return the view of a strided copy.

        Args:
            copy: the strided copy.
            places: bytes from one place to the next, number of places.
            alignment: bytes that divide the distances between cells on both sides.
        """
        storing = self._side == "src"
        address, offset = (copy.src, copy.dst) if storing else (copy.dst, copy.src)
        word = largest_word(copy, alignment, offset, address - self._pool.base(address))
        elements = self._pool.view(copy, self._side, *places, word)
        return CopyView(
            copy=copy,
            word=word,
            elements=elements if elements.is_cuda else elements.numpy(),
            offset=offset,
            shape=(*(loop.count for loop in copy.loops), copy.run // word),
            strides=(*((loop.dst if storing else loop.src) for loop in copy.loops), word),
        )
