"""Copies of equal runs between scattered KV blocks and host memory, as the host tier makes them."""

from __future__ import annotations

import time

import numpy as np
import torch

from kvferry.memory.address_space import AddressSpace, region_over
from kvferry.memory.pool_cells import PoolCells
from kvferry.planning.cell_copy import ONE_CELL, PoolCopies
from kvferry.planning.strided_copy import StridedCopy


class HostCopy:
    """Blocks of one run each, in random order, and as much host memory.

    Args:
        run: bytes of a block.
        size: number of bytes to copy; rounded down to whole blocks, but at least one block.
        device: torch device of the blocks.
        engine_bytes: run length in bytes from which the GPU's copy engine copies instead of the kernel.

    Attributes:
        pool, host: memory of the blocks and of the host, uint8 of shape (bytes,).
        order: block of each run in `host`, int64 of shape (blocks,).
    """

    def __init__(self, run: int, size: int, device: str, *, engine_bytes: int) -> None:
        blocks = max(1, size // run)
        self.pool = torch.zeros(blocks * run, dtype=torch.uint8, device=device)
        # As the host tier pins its arena: a GPU cannot copy from other memory by itself.
        self.host = torch.zeros(blocks * run, dtype=torch.uint8, pin_memory=device != "cpu")
        # As in an engine that has run for a while, where free blocks are scattered.
        self.order = np.random.default_rng(5).permutation(blocks)
        self._offsets = np.arange(blocks) * run
        region = region_over(self.pool)
        self._store, self._load = (
            PoolCells(
                [PoolCopies(ONE_CELL, (copy,))],
                AddressSpace([region]),
                side=side,
                stride=run,
                blocks=blocks,
                engine_bytes=engine_bytes,
            )
            for side, copy in (
                ("src", StridedCopy(region.address, 0, run)),
                ("dst", StridedCopy(0, region.address, run)),
            )
        )

    def store(self) -> float:
        return self._timed(self._store)

    def load(self) -> float:
        return self._timed(self._load)

    def _timed(self, cells: PoolCells) -> float:
        (part,) = cells.parts
        memory = self.host.numpy() if cells.on_host else self.host
        started = time.perf_counter()
        cells.copy(part, part.places(self.order, np.zeros_like(self.order)), memory, self._offsets)
        cells.wait()
        return time.perf_counter() - started
