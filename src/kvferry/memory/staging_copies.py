"""Gather cells from KV blocks into staging memory, and scatter them from staging memory into KV blocks.

A cell is the unit of transfer: the largest number of tokens that divides the block sizes of both sides. A
packed image is one cell in contiguous memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvferry.memory.address_space import AddressSpace
from kvferry.memory.pool_cells import PoolCells
from kvferry.planning.cell_copy import PoolCopies
from kvferry.planning.descriptors import Int64s
from kvferry.planning.strategy import COPY_ENGINE_BYTES


@dataclass(frozen=True, slots=True)
class StagedImages:
    """Images (cells packed into contiguous memory) in staging memory, at equal distances.

    A cell is a run of tokens that is copied as one unit. The image with index ``i`` starts at
    ``address + i * stride``.

    Attributes:
        space: staging memory that holds the images.
        address: address of image 0.
        stride: bytes from one image to the next.
    """

    space: AddressSpace
    address: int
    stride: int


class StagingCopies:
    """Copies cells between KV blocks and staging memory, on the same device or in host memory.

    A cell is a run of tokens that is copied as one unit. In staging memory, each cell is an image (packed, in
    contiguous memory). If the blocks are on a GPU, staging memory of the host must be registered with CUDA.
    Every method returns when its copies are complete, also on a GPU.
    """

    def __init__(
        self, parts: Sequence[PoolCopies], pool: AddressSpace, side: str, stride: int, blocks: int
    ) -> None:
        """Create the views of the block pool.

        Args:
            parts: strided copies of a cell (run of tokens that is copied as one unit). Their addresses in the
                pool are those of block 0. On the other side, they are byte offsets in an image (cell packed
                into contiguous memory).
            pool: registered memory that holds the blocks.
            side: side of the copies that is the pool: "src" for `gather`, "dst" for `scatter`.
            stride: bytes from one block to the next.
            blocks: number of blocks.

        Raises:
            TransferError: the copies exceed the pool's memory.
        """
        self._pool = PoolCells(
            parts, pool, side=side, stride=stride, blocks=blocks, engine_bytes=COPY_ENGINE_BYTES
        )

    def gather(self, blocks: Int64s, cells: Int64s, staged: StagedImages, first: int) -> None:
        """Copy cells (runs of tokens) from KV blocks into images (packed cells) in staging memory.

        Args:
            blocks: block id of each cell, int64 of shape (n,).
            cells: index of each cell, counted from the start of the prompt, int64 of shape (n,). It
                determines the cell's position in its block.
            staged: images in staging memory.
            first: index of the image of the first cell; the other images follow it.

        Raises:
            TransferError: the images exceed the staging memory.
        """
        self._copy(blocks, cells, staged, first)

    def scatter(self, blocks: Int64s, cells: Int64s, staged: StagedImages, first: int) -> None:
        """Copy cells (runs of tokens) from images (packed cells) in staging memory into KV blocks.

        Args:
            blocks: block id of each cell, int64 of shape (n,).
            cells: index of each cell, counted from the start of the prompt, int64 of shape (n,). It
                determines the cell's position in its block.
            staged: images in staging memory.
            first: index of the image of the first cell; the other images follow it.

        Raises:
            TransferError: the images exceed the staging memory.
        """
        self._copy(blocks, cells, staged, first)

    def clear(self, blocks: Int64s) -> None:
        """Zero the bytes of these KV blocks that `gather` or `scatter` copies. Other bytes stay as they are.

        Args:
            blocks: block ids, int64 of shape (n,).
        """
        self._pool.clear(blocks)
        self._pool.wait()

    def _copy(self, blocks: Int64s, cells: Int64s, staged: StagedImages, first: int) -> None:
        memory, start = staged.space.bytes_at(staged.address)
        packed = memory if self._pool.on_host else torch.as_tensor(memory)
        offsets = start + (first + np.arange(len(blocks))) * staged.stride
        try:
            for part in self._pool.parts:
                self._pool.copy(part, part.places(blocks, cells), packed, offsets)
        finally:
            self._pool.wait()  # also after an error: the memory may then be used for something else
