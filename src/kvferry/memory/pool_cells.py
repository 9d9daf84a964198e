"""Strided views of the cells of a block pool: the engine's side of every copy.

Cells with the same strided copies differ only in their start. So each strided copy has one view of the whole
pool. The first axis of the view counts the *places*, the positions at which a cell may start, at equal
distances, and a copy indexes that axis. Contiguous runs are never listed: a transposed layout, with runs of
one element, is an ordinary copy between two strided views.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

import numpy as np
import torch

from kvferry.memory.address_space import AddressSpace, largest_word
from kvferry.memory.device_copy import compile_kernel, copy_cells_on_device
from kvferry.memory.device_stream import finish_stream
from kvferry.memory.host_copy import CellViews, CopyView, copy_cells
from kvferry.planning.cell_copy import PoolCopies
from kvferry.planning.descriptors import Int64s
from kvferry.planning.strategy import COPY_ENGINE_BYTES
from kvferry.planning.strided_copy import StridedCopy


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
        side: str,
        stride: int,
        blocks: int,
        *,
        alignments: Sequence[int] = (),
        engine_bytes: int = COPY_ENGINE_BYTES,
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

        Raise TransferError if a cell is outside the block pool or `memory`.
        """
        if not self.on_host:
            copy_cells_on_device(part, places, memory, offsets, self._engine_bytes)
            return
        for view in part.copies:
            copy_cells(view, places, memory, offsets)

    def clear(self, blocks: Int64s, cells: Int64s) -> None:
        """Zero the bytes of cells that the strided copies touch. On a GPU, only queue it.

        `blocks` and `cells`, numbers as in `Cells`, are int64 of shape (n,).
        """
        for part in self.parts:
            places = part.places(blocks, cells).tolist()
            for view in part.copies:
                for place in places:
                    view.elements[place] = 0

    def wait(self) -> None:
        """Wait until the copies that the calling thread has queued are done. Other threads' work goes on."""
        if self.on_host:
            return
        if views := [view for part in self.parts for view in part.copies]:
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
            size=copy.bytes,
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
