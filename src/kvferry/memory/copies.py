"""Copy cells between an engine's KV blocks and chunks in host memory, or images in staging memory.

The planner treats the arena as a pool of chunks at address 0 (`geometry.canonical.chunk_pool`), so on that
side the strided copies have offsets within a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
import numpy.typing as npt
import torch

from kvferry.common.errors import TransferError
from kvferry.memory.address_space import AddressSpace
from kvferry.memory.host_copy import digest_cells, packed_cell
from kvferry.memory.image_digest import DIGEST_BYTES
from kvferry.memory.pool_cells import PoolCells
from kvferry.planning.cell_copy import PoolCopies
from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import Cells
from kvferry.planning.template import Route


class ChunkCopies(PoolCells):
    """Copies cells between one rank's KV blocks and chunks in host memory, for the layers of one route.

    If the blocks are on a GPU, `store`, `load` and `clear` only queue their copies on the calling thread's
    current stream, and `wait` waits for them. Until then nothing else may write to these blocks and chunks.

    Args:
        side: side of the route that is the rank: "src" to store chunks, "dst" to load them.
        engine: registered memory of the rank.
        memory: the arena, uint8 of shape (bytes,). If the blocks are on a GPU, it must be registered with
            CUDA (`host_registration`).
        engine_bytes: run length in bytes from which the GPU's copy engine copies instead of a kernel.

    Raises:
        TransferError: the strided copies exceed the rank's memory.
    """

    def __init__(
        self,
        route: Route,
        side: str,
        engine: AddressSpace,
        memory: npt.NDArray[np.uint8],
        engine_bytes: int,
    ) -> None:
        storing = side == "src"
        # Byte offset of each cell in its chunk, for each part of the route.
        self._chunk_cells = [
            np.array(part.dst_offsets if storing else part.src_offsets, np.int64)
            for part in route.cell_copies
        ]
        parts = [
            PoolCopies(
                part.src_offsets if storing else part.dst_offsets,
                # Tensor views allow no negative strides.
                tuple(copy for one in part.copies for copy in one.ascending()),
            )
            for part in route.cell_copies
        ]
        super().__init__(
            parts,
            engine,
            side,
            stride=route.src_stride if storing else route.dst_stride,
            blocks=route.src_blocks if storing else route.dst_blocks,
            alignments=[gcd(*cells.tolist()) for cells in self._chunk_cells],
            engine_bytes=engine_bytes,
        )
        self._memory, self._packed = memory, memory if self.on_host else torch.from_numpy(memory)

    def store(self, cells: Cells, offsets: Int64s) -> None:
        """Copy cells from KV blocks to chunks. `cells.dst_block` indexes `offsets`, from `offsets_of`."""
        self._copy(cells.src_block, cells.src_number, offsets[cells.dst_block], cells.dst_number)

    def load(self, cells: Cells, offsets: Int64s) -> None:
        """Copy cells from chunks to KV blocks. `cells.src_block` indexes `offsets`, from `offsets_of`."""
        self._copy(cells.dst_block, cells.dst_number, offsets[cells.src_block], cells.src_number)

    def blank(self, cells: Int64s, offset: int) -> None:
        """Zero cells, given by their `Cells.dst_number`, of the chunk at a byte offset in host memory."""
        for part, chunk_cells in zip(self.parts, self._chunk_cells, strict=True):
            for at in (offset + chunk_cells[cells % len(chunk_cells)]).tolist():
                for view in part.copies:
                    packed_cell(view, self._memory, at)[...] = 0

    def _copy(self, blocks: Int64s, cells: Int64s, chunks: Int64s, numbers: Int64s) -> None:
        for part, chunk_cells in zip(self.parts, self._chunk_cells, strict=True):
            places = part.places(blocks, cells)
            offsets = chunks + chunk_cells[numbers % len(chunk_cells)]
            self.copy(part, places, self._packed, offsets)


def offsets_of(offsets: Sequence[int]) -> Int64s:
    """Return the byte offsets of chunks as an array for `ChunkCopies`: int64 of shape (chunks + 1,)."""
    # Indices into it take the place of block ids, and block id 0 means "no block".
    return np.array((0, *offsets), np.int64)


@dataclass(frozen=True, slots=True)
class StagedImages:
    """Images in staging memory, at equal distances: image ``i`` starts at ``address + i * stride``."""

    space: AddressSpace
    address: int
    stride: int


class StagingCopies(PoolCells):
    """Copies cells between KV blocks and images in staging memory, on the same device or in host memory.

    If the blocks are on a GPU, staging memory of the host must be registered with CUDA. Every method returns
    when its copies are complete, also on a GPU. The side is "src" for `gather` and "dst" for `scatter`.
    """

    def gather(self, blocks: Int64s, cells: Int64s, staged: StagedImages, first: int) -> None:
        """Copy cells from KV blocks into consecutive images, or raise TransferError if memory ends first.

        `cells` are numbers as in `Cells`, int64, and `first` is the index of the first image.
        """
        self._copy(blocks, cells, staged, first)

    def scatter(self, blocks: Int64s, cells: Int64s, staged: StagedImages, first: int) -> None:
        """Copy cells from consecutive images into KV blocks. The arguments are those of `gather`."""
        self._copy(blocks, cells, staged, first)

    def digest(self, blocks: Int64s, cells: Int64s, stride: int) -> bytes:
        """Return the digest (`image_digest`) of cells in KV blocks, packed into images every `stride` bytes.

        The copies are those of a `planning.digest_image`. The other arguments are those of `gather`. Raise
        TransferError if a cell is outside the block pool, or the blocks are on a GPU.
        """
        if not self.on_host:
            raise TransferError("KV blocks in GPU memory cannot be digested")
        positions, digest = np.arange(len(blocks)) * stride, 0
        for part in self.parts:
            places = part.places(blocks, cells)
            digest += sum(digest_cells(view, places, positions) for view in part.copies)
        return (digest % (1 << 8 * DIGEST_BYTES)).to_bytes(DIGEST_BYTES, "little")

    def clear(self, blocks: Int64s, cells: Int64s) -> None:
        super().clear(blocks, cells)
        self.wait()

    def _copy(self, blocks: Int64s, cells: Int64s, staged: StagedImages, first: int) -> None:
        memory, start = staged.space.bytes_at(staged.address)
        packed = memory if self.on_host else torch.as_tensor(memory)
        offsets = start + (first + np.arange(len(blocks))) * staged.stride
        try:
            for part in self.parts:
                self.copy(part, part.places(blocks, cells), packed, offsets)
        finally:
            self.wait()  # also after an error: the memory may then be used for something else
