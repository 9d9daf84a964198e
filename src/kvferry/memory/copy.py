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

import numpy as np
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
        for images, pool in self._pairs(slots, first, step, len(blocks)):
            if pool.is_cuda:
                torch.index_select(pool, 0, blocks, out=images)
                continue
            to, of = images.numpy(), pool.numpy()
            for image, block in enumerate(blocks.tolist()):
                np.copyto(to[image], of[block])
        self._wait()

    def scatter(self, blocks: torch.Tensor, slots: Slots, first: int, step: int) -> None:
        """Copy from images to blocks; arguments as of `gather`."""
        for images, pool in self._pairs(slots, first, step, len(blocks)):
            if pool.is_cuda:
                pool.index_copy_(0, blocks, images)
                continue
            to, of = pool.numpy(), images.numpy()
            for image, block in enumerate(blocks.tolist()):
                np.copyto(to[block], of[image])
        self._wait()

    def clear(self, blocks: torch.Tensor) -> None:
        """Zero what the loops cover of these blocks."""
        for _, _, pool in self._pool:
            of = pool if pool.is_cuda else pool.numpy()
            for block in blocks.tolist():
                of[block] = 0
        self._wait()

    def _wait(self) -> None:
        """What the transport or the engine does next comes after this, though it uses other streams."""
        for _, _, pool in self._pool[:1]:
            if pool.is_cuda:
                torch.cuda.synchronize(pool.device)

    def _pairs(
        self, slots: Slots, first: int, step: int, count: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Of every nest, the images and the whole pool; of one shape but for the first axis."""
        address = slots.address + first * slots.stride
        for nest, word, pool in self._pool:
            side, at = ("dst", nest.at(0, address)) if self._side == "src" else ("src", nest.at(address, 0))
            yield slots.space.view(at, side, step * slots.stride, count, word), pool
