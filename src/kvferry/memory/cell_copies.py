"""Gather and scatter: the loops of a nest, executed as strided tensor copies.

Works where the memory is: on a CUDA device by its index kernels, on a CPU by numpy's strided copies, block by
block. Nothing is enumerated; a transposed interior, whose runs are one element, is a copy between two strided
views like any other.

On a CPU not by torch: above some thousand elements its operations wait for all of the process's compute
threads, which have other work. Beside a busy engine `index_select` then takes 20 ms for what takes 0.5.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
import torch

from kvferry.memory.address_space import AddressSpace, largest_word
from kvferry.planning.cell_copy import PoolCopies
from kvferry.planning.descriptors import Int64s
from kvferry.planning.strided_copy import StridedCopy


@dataclass(frozen=True, slots=True)
class StagedCells:
    """Images in staging memory: number ``i`` starts at ``address + i * stride``.

    Attributes:
        space: in which they are.
        address: of the first.
        stride: bytes from one to the next.
    """

    space: AddressSpace
    address: int
    stride: int


@dataclass(frozen=True, slots=True)
class _CellViews:
    """Nests whose cells lie alike in the blocks of the pool.

    Attributes:
        block, cells: distance between blocks, and from the first cell of a block to each, in places.
        views: nest, word, and what it covers of the pool from every place on where a cell may begin.
    """

    block: int
    cells: Int64s
    views: tuple[tuple[StridedCopy, int, torch.Tensor], ...]

    def index(self, blocks: Int64s, cells: Int64s) -> Int64s:
        """Return the places of cells in the views."""
        return blocks * self.block + self.cells[cells % len(self.cells)]


class CellCopies:
    """The nests of a cell, between the blocks of a pool and images; views are made once.

    Every operation is over when it returns, on a device too.
    """

    def __init__(
        self, parts: Sequence[PoolCopies], pool: AddressSpace, side: str, stride: int, blocks: int
    ) -> None:
        """Prepare.

        Args:
            parts: one side's addresses are absolute, of block 0; the other's are offsets in an image.
            pool: registered memory of the blocks.
            side: which side the pool is on, "src" to gather, "dst" to scatter.
            stride: bytes between blocks.
            blocks: how many there are.

        Raises:
            TransferError: the nests leave the pool's memory.
        """
        self._side = side
        self._parts = tuple(self._part(part, pool, stride, blocks) for part in parts)

    def gather(self, blocks: Int64s, cells: Int64s, slots: StagedCells, first: int) -> None:
        """Copy cells from blocks to images.

        Args:
            blocks: id of the block of every cell, of shape (n,).
            cells: number of every cell in its sequence, of shape (n,).
            slots: the images.
            first: number of the first image.
        """
        for part, images, pool in self._pairs(slots, first, len(blocks)):
            index = part.index(blocks, cells)
            if pool.is_cuda:
                torch.index_select(pool, 0, torch.from_numpy(index).to(pool.device), out=images)
                continue
            to, of = images.numpy(), pool.numpy()
            for image, at in enumerate(index.tolist()):
                np.copyto(to[image], of[at])
        self._wait()

    def scatter(self, blocks: Int64s, cells: Int64s, slots: StagedCells, first: int) -> None:
        """Copy cells from images to blocks; arguments as of `gather`."""
        for part, images, pool in self._pairs(slots, first, len(blocks)):
            index = part.index(blocks, cells)
            if pool.is_cuda:
                pool.index_copy_(0, torch.from_numpy(index).to(pool.device), images)
                continue
            to, of = pool.numpy(), images.numpy()
            for image, at in enumerate(index.tolist()):
                np.copyto(to[at], of[image])
        self._wait()

    def clear(self, blocks: Int64s) -> None:
        """Zero what the loops cover of all cells of these blocks."""
        for part in self._parts:
            cells = np.arange(len(part.cells))
            index = part.index(blocks[:, None], cells).reshape(-1).tolist()
            for _, _, pool in part.views:
                of = pool if pool.is_cuda else pool.numpy()
                for at in index:
                    of[at] = 0
        self._wait()

    def _part(self, part: PoolCopies, pool: AddressSpace, stride: int, blocks: int) -> _CellViews:
        unit = gcd(stride, *part.at)
        count = ((blocks - 1) * stride + max(part.at)) // unit + 1
        views = []
        for nest in part.nests:
            address, inside = (nest.src, nest.dst) if self._side == "src" else (nest.dst, nest.src)
            word = largest_word(nest, unit, inside, address - pool.base(address))
            views.append((nest, word, pool.view(nest, self._side, unit, count, word)))
        return _CellViews(stride // unit, np.array(part.at, np.int64) // unit, tuple(views))

    def _wait(self) -> None:
        """Wait until the copies are done: the transport and the engine use other streams."""
        for part in self._parts[:1]:
            for _, _, pool in part.views[:1]:
                if pool.is_cuda:
                    torch.cuda.synchronize(pool.device)

    def _pairs(
        self, slots: StagedCells, first: int, count: int
    ) -> Iterator[tuple[_CellViews, torch.Tensor, torch.Tensor]]:
        """Yield views of the images and of the whole pool for every nest, alike but for the first axis."""
        address = slots.address + first * slots.stride
        for part in self._parts:
            for nest, word, pool in part.views:
                side, at = (
                    ("dst", nest.at(0, address)) if self._side == "src" else ("src", nest.at(address, 0))
                )
                yield part, slots.space.view(at, side, slots.stride, count, word), pool
