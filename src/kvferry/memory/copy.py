"""Gather and scatter: the loops of a nest, executed as strided tensor copies.

Works where the memory is: a CPU's by ATen's strided copies, a CUDA device's by its index kernels. Nothing is
enumerated; a transposed interior, whose runs are one element, is a copy between two strided views like any
other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvferry.memory.space import Space, word_of
from kvferry.planning.nest import Nest


@dataclass(frozen=True, slots=True)
class Slots:
    """Images in staging memory: number ``i`` starts at ``address + i * stride``.

    Attributes:
        space: in which they are.
        address: of the first.
        stride: bytes from one to the next.
    """

    space: Space
    address: int
    stride: int


class Loops:
    """The nests of one phase, between the blocks of a pool and images; views are made once.

    Every operation is over when it returns, on a device too.
    """

    def __init__(self, nests: Sequence[Nest], pool: Space, side: str, stride: int, blocks: int) -> None:
        """Prepare.

        Args:
            nests: one side's addresses are absolute, of block 0; the other's are offsets in an image.
            pool: registered memory of the blocks.
            side: which side the pool is on, "src" to gather, "dst" to scatter.
            stride: bytes between blocks.
            blocks: how many there are.

        Raises:
            TransferError: the nests leave the pool's memory.
        """
        self._side = side
        self._pool = []
        for nest in nests:
            address = nest.src if side == "src" else nest.dst
            inside = nest.dst if side == "src" else nest.src
            word = word_of(nest, stride, inside, address - pool.base(address))
            self._pool.append((nest, word, pool.view(nest, side, stride, blocks, word)))

    def gather(self, blocks: torch.Tensor, slots: Slots, first: int, step: int) -> None:
        """Copy from blocks to images `first`, ``first + step``, ...

        Args:
            blocks: ids, int64 of shape (n,), on the pool's device.
            slots: the images.
            first, step: which of them.
        """
        for nest, word, pool in self._pool:
            images = self._images(nest, word, slots, first, step, len(blocks))
            torch.index_select(pool, 0, blocks, out=images)
        self._wait()

    def scatter(self, blocks: torch.Tensor, slots: Slots, first: int, step: int) -> None:
        """Copy from images to blocks; arguments as of `gather`."""
        for nest, word, pool in self._pool:
            images = self._images(nest, word, slots, first, step, len(blocks))
            if pool.is_cuda:
                pool.index_copy_(0, blocks, images)
                continue
            # On a CPU the strided copy of one block is three times as fast as index_copy_ of many.
            for block, image in zip(blocks.tolist(), images, strict=True):
                pool[block].copy_(image)
        self._wait()

    def clear(self, blocks: torch.Tensor) -> None:
        """Zero what the loops cover of these blocks."""
        for _, _, pool in self._pool:
            for block in blocks.tolist():
                pool[block].zero_()
        self._wait()

    def _wait(self) -> None:
        """What the transport or the engine does next comes after this, though it uses other streams."""
        for _, _, pool in self._pool[:1]:
            if pool.is_cuda:
                torch.cuda.synchronize(pool.device)

    def _images(self, nest: Nest, word: int, slots: Slots, first: int, step: int, count: int) -> torch.Tensor:
        address = slots.address + first * slots.stride
        side, placed = ("dst", nest.at(0, address)) if self._side == "src" else ("src", nest.at(address, 0))
        return slots.space.view(placed, side, step * slots.stride, count, word)
