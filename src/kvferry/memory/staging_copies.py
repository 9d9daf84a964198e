"""Gather cells from KV blocks into staging memory, and scatter them from staging memory into KV blocks."""

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
    """Images in staging memory, at equal distances: image ``i`` starts at ``address + i * stride``."""

    space: AddressSpace
    address: int
    stride: int


class StagingCopies:
    """Copies cells between KV blocks and images in staging memory, on the same device or in host memory.

    If the blocks are on a GPU, staging memory of the host must be registered with CUDA. Every method returns
    when its copies are complete, also on a GPU. The arguments are those of `PoolCells`, with "src" for
    `gather` and "dst" for `scatter`.
    """

    def __init__(
        self, parts: Sequence[PoolCopies], pool: AddressSpace, side: str, stride: int, blocks: int
    ) -> None:
        self._pool = PoolCells(
            parts, pool, side=side, stride=stride, blocks=blocks, engine_bytes=COPY_ENGINE_BYTES
        )

    def gather(self, blocks: Int64s, cells: Int64s, staged: StagedImages, first: int) -> None:
        """Copy cells from KV blocks into consecutive images, or raise TransferError if memory ends first.

        `cells` are indices from the start of the prompt, `first` is that of the first image. The arrays are
        int64 of shape (n,).
        """
        self._copy(blocks, cells, staged, first)

    def scatter(self, blocks: Int64s, cells: Int64s, staged: StagedImages, first: int) -> None:
        """Copy cells from consecutive images into KV blocks. The arguments are those of `gather`."""
        self._copy(blocks, cells, staged, first)

    def clear(self, blocks: Int64s) -> None:
        """Zero the bytes of KV blocks that the copies touch. `blocks` are ids, int64 of shape (n,)."""
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
