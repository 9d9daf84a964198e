"""Strided views of the cells of a block pool: the engine's side of every copy.

Cells with the same strided copies differ only in their start. So each strided copy has one view of the whole
pool. The first axis of the view counts the *places*, the positions at which a cell may start, at equal
distances, and a copy indexes that axis. Contiguous runs are never listed: a transposed layout, with runs of
one element, is an ordinary copy between two strided views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
import torch

from kvferry.memory.address_space import AddressSpace, largest_word
from kvferry.memory.device_copy import compile_kernel, copy_cells_on_device
from kvferry.memory.device_stream import finish_stream
from kvferry.memory.host_copy import copy_cells
from kvferry.planning.cell_copy import PoolCopies
from kvferry.planning.descriptors import Int64s
from kvferry.planning.strided_copy import StridedCopy


@dataclass(frozen=True, slots=True, eq=False)
class CopyView:
    """A view of a block pool through which one strided copy can be run for any cell.

    The copy connects a cell in the pool with the same cell outside of it, in packed memory or in a chunk.
    """

    copy: StridedCopy
    storing: bool  # whether the pool is the source of the copy
    # Loops of the copy, sorted by descending stride in the pool, int64 of shape (loops, 3). A row is (count,
    # source stride in bytes, destination stride in bytes).
    loops: Int64s
    word: int  # size in bytes of an element of `elements`
    # View of the pool, of shape (places, count of every loop in `copy.loops`, elements of a run): an array
    # for host memory, a tensor for GPU memory.
    elements: Any
    device_loops: Any  # the loops in GPU memory, the innermost first; None for host memory
    offset: int  # byte offset of the first run in the cell outside the pool
    # Those of a view of that cell, in elements and in bytes.
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    extent: int  # bytes from the start of its first run to the end of its last


@dataclass(frozen=True, slots=True, eq=False)
class CellViews:
    """Views of a block pool through which a set of strided copies can be run for any cell."""

    block_places: int  # number of places from the start of one block to the start of the next
    # Number of places from the start of a block to each of its cells, int64 of shape (cells per block,).
    cell_places: Int64s
    copies: tuple[CopyView, ...]

    def places(self, blocks: Int64s, numbers: Int64s) -> Int64s:
        """Return the index of each cell on the first axis of `CopyView.elements`, int64.

        `numbers` count from the start of the prompt, and broadcast with the block ids.
        """
        return blocks * self.block_places + self.cell_places[numbers % len(self.cell_places)]


class PoolCells:
    """Views of all cells of a block pool, created once.

    Args:
        parts: strided copies that together copy a cell. Their addresses in the pool are those of block 0. On
            the other side, they are byte offsets in a packed cell or in a chunk.
        pool: registered memory that holds the blocks.
        side: side of the copies that is the pool, "src" or "dst".
        stride: bytes from one block to the next.
        blocks: number of blocks.
        alignments: for each part, a number of bytes that divides all distances between its cells outside
            the pool. Empty for no limit.
        engine_bytes: run length in bytes from which the GPU's copy engine copies between GPU and host.

    Raises:
        TransferError: the copies exceed the pool's memory.
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
        engine_bytes: int = 0,
    ) -> None:
        self._pool, self._side, self._stride, self._blocks = pool, side, stride, blocks
        self.on_host, self._engine_bytes = pool.on_host, engine_bytes
        self.parts = tuple(map(self._part, parts, alignments or [0] * len(parts)))
        if not self.on_host:
            for part in self.parts:
                for view in part.copies:
                    # Now, or the first transfer of each kind would wait for it.
                    compile_kernel(view)

    def copy(self, part: CellViews, places: Int64s, memory: Any, offsets: Int64s) -> None:
        """Copy cells between the pool and packed memory. On a GPU, only queue the copies; `wait` waits.

        Args:
            places: index of each cell on the first axis of `CopyView.elements`, int64 of shape (n,).
            memory: uint8 of shape (bytes,): an array for a pool in host memory, a tensor for a pool on a GPU.
                If the tensor is in host memory, it must be registered with CUDA.
            offsets: byte offset in `memory` of each packed cell, int64 of shape (n,).

        Raises:
            TransferError: a cell is outside the block pool or `memory`.
        """
        if not self.on_host:
            copy_cells_on_device(part, places, memory, offsets, self._engine_bytes)
            return
        for view in part.copies:
            copy_cells(view, places, memory, offsets)

    def clear(self, blocks: Int64s) -> None:
        """Zero the bytes of blocks that the strided copies touch. On a GPU, only queue it."""
        for part in self.parts:
            places = part.places(blocks[:, None], np.arange(len(part.cell_places))).reshape(-1).tolist()
            for view in part.copies:
                for place in places:
                    view.elements[place] = 0

    def wait(self) -> None:
        """Wait until the copies that the calling thread has queued are done. Other threads' work goes on."""
        views = [view for part in self.parts for view in part.copies]
        if views and not self.on_host:
            finish_stream(views[0].elements.device)  # all views are on one device

    def _part(self, part: PoolCopies, alignment: int) -> CellViews:
        unit = gcd(self._stride, *part.at)
        count = ((self._blocks - 1) * self._stride + max(part.at)) // unit + 1
        views = tuple(self._view(copy, (unit, count), gcd(unit, alignment)) for copy in part.nests)
        return CellViews(self._stride // unit, np.array(part.at, np.int64) // unit, views)

    def _view(self, copy: StridedCopy, places: tuple[int, int], alignment: int) -> CopyView:
        """Return the view of the block pool for one strided copy, which starts at the first place.

        `places` are (bytes between them, number). `alignment` divides all distances between cells.
        """
        storing = self._side == "src"
        address, offset = (copy.src, copy.dst) if storing else (copy.dst, copy.src)
        # GPUs access whole words at multiples of their size only. CPUs access them anywhere.
        origin = self._pool.base(address) if self.on_host else 0
        word = largest_word(copy, alignment, offset, address - origin)
        elements = self._pool.view(copy, self._side, *places, word)
        distances = [loop.dst if storing else loop.src for loop in copy.loops]
        # In the order of addresses in the pool, whose runs are far apart: CPUs read ahead in sequence only.
        in_order = sorted(copy.loops, key=lambda loop: loop.src if storing else loop.dst, reverse=True)
        loops = np.array([(loop.count, loop.src, loop.dst) for loop in in_order], np.int64).reshape(-1, 3)
        return CopyView(
            copy=copy,
            storing=storing,
            loops=loops,
            word=word,
            elements=elements.numpy() if self.on_host else elements,
            device_loops=None if self.on_host else torch.from_numpy(loops[::-1].copy()).to(elements.device),
            offset=offset,
            shape=(*(loop.count for loop in copy.loops), copy.run // word),
            strides=(*distances, word),
            extent=sum((loop.count - 1) * far for loop, far in zip(copy.loops, distances, strict=True))
            + copy.run,
        )
