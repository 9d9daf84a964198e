"""Memory of a shape's geometry in this process, with marks that tell every page from every other."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvferry.bench.shapes import Shape
from kvferry.errors import ConfigError, TransferError
from kvferry.planning.pieces import Int64s


class Pool:
    """Blocks of KV cache, all of whose memory has been touched.

    Attributes:
        shape: what they hold.
        bytes: the memory, uint8.
        geometry: where its pages lie.
    """

    def __init__(self, shape: Shape, num_blocks: int) -> None:
        """Allocate `num_blocks` blocks, the null block among them.

        Raises:
            ConfigError: there is not enough memory.
        """
        self.shape = shape
        size = shape.block_bytes * num_blocks
        try:
            self.bytes: npt.NDArray[np.uint8] = np.empty(size, np.uint8)
        except MemoryError as error:
            raise ConfigError(
                f"{size / 2**30:.1f} GiB for the pages of one side cannot be had; choose fewer --tokens"
            ) from error
        # Any value but zero: pages of zeros may be shared by the kernel until they are written.
        self.bytes.fill(0xFF)
        self.geometry = shape.geometry(int(self.bytes.ctypes.data), num_blocks)
        # First and last 8 bytes of every page: (layers, blocks, 2).
        words = self.bytes.view(np.uint64).reshape(shape.layers, num_blocks, shape.page_bytes // 8)
        self._ends = words[:, :, :: shape.page_bytes // 8 - 1]

    def mark(self) -> None:
        """Give both ends of every page a number of their own."""
        self._ends[...] = self._marks(np.arange(self._ends.shape[1], dtype=np.int64))

    def wipe(self) -> None:
        """Remove all marks."""
        self._ends[...] = 0

    def check(self, src_table: Int64s, dst_table: Int64s) -> None:
        """Raise TransferError unless blocks `dst_table` carry the marks of a peer's `src_table`."""
        wrong = int((self._ends[:, dst_table] != self._marks(src_table)).any(axis=2).sum())
        if wrong:
            pages = self.shape.layers * len(dst_table)
            raise TransferError(f"{wrong} of {pages} pages do not hold what was read: please report this")

    def _marks(self, blocks: Int64s) -> npt.NDArray[np.uint64]:
        layers = np.arange(1, self.shape.layers + 1, dtype=np.uint64)[:, None, None]
        ends = np.arange(2, dtype=np.uint64)[None, None, :]
        return layers << np.uint64(40) | blocks.astype(np.uint64)[None, :, None] << np.uint64(1) | ends
