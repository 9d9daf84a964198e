"""Check gathers and scatters on the device: bytes against the host's copies, speed against a device copy."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from benchmarks.gpu_check.job import DeviceSpace, GpuCheckJob, seconds_of
from benchmarks.gpu_check.result import CheckResult, Figure, judged, ratio_figure
from kvferry.common.errors import TransferError
from kvferry.memory import device_kernel
from kvferry.memory.address_space import AddressSpace, region_over
from kvferry.memory.pool_cells import PoolCells
from kvferry.planning.cell_copy import ONE_CELL, PoolCopies
from kvferry.planning.strided_copy import Loop, StridedCopy

LEAST_OF_DEVICE_COPY = 0.8
_HEADS, _COMPARED_BYTES = 8, 16 << 20


class BlockCopy:
    """Copies blocks of 8 heads between a pool and staging memory, where heads and tokens change their order.

    Attributes:
        pool: memory of the blocks, uint8 of shape (bytes,).
        images: staging memory, uint8 of shape (bytes,).
    """

    def __init__(
        self, run: int, size: int, device: str, side: str, space: type[AddressSpace] = DeviceSpace
    ) -> None:
        """Allocate both memories, and prepare the copy.

        Args:
            run: bytes of one head and token.
            size: bytes to copy; rounded down to whole blocks, but at least two blocks.
            device: torch device.
            side: ``src`` to gather, ``dst`` to scatter.
            space: `DeviceSpace` to copy as on a GPU, `AddressSpace` to copy as the memory's device does.
        """
        tokens = max(2, min(16, (64 << 10) // run))
        block = _HEADS * tokens * run
        count = max(2, size // block)
        self.pool, self.images = (
            torch.zeros(count * block, dtype=torch.uint8, device=device) for _ in range(2)
        )
        self._side, self._order = side, np.random.default_rng(run).permutation(count)
        address = region_over(self.pool).address
        ends = [(_HEADS, run, tokens * run), (tokens, _HEADS * run, run)]
        gathers = side == "src"
        loops = tuple(Loop(n, a, b) if gathers else Loop(n, b, a) for n, a, b in ends)
        copy = StridedCopy(address if gathers else 0, 0 if gathers else address, run, loops)
        self._cells = PoolCells(
            [PoolCopies(ONE_CELL, (copy,))],
            space([region_over(self.pool)]),
            side=side,
            stride=block,
            blocks=count,
            engine_bytes=0,
        )
        self._offsets = np.arange(count) * block

    def fill(self) -> None:
        """Write random bytes into both memories, the same for every device."""
        draw = np.random.default_rng(3)
        for memory in (self.pool, self.images):
            memory.copy_(torch.from_numpy(draw.integers(0, 256, memory.nbytes, np.uint8)))

    def queue(self) -> None:
        """Copy all blocks, in random order. On a GPU, only queue the copies."""
        (part,) = self._cells.parts
        places = part.places(self._order, np.zeros_like(self._order))
        memory = self.images.numpy() if self._cells.on_host else self.images
        self._cells.copy(part, places, memory, self._offsets)

    def wait(self) -> None:
        """Wait until the queued copies are done."""
        self._cells.wait()

    @property
    def copied(self) -> torch.Tensor:
        """Memory that the copy writes."""
        return self.images if self._side == "src" else self.pool


def check_copies(job: GpuCheckJob) -> CheckResult:
    """Gather and scatter runs of several lengths, compare every byte, and compare speeds.

    Args:
        job: device and sizes.

    Raises:
        TransferError: a byte differs from what the host's copies write.
    """
    figures = []
    least = LEAST_OF_DEVICE_COPY if job.on_gpu else None
    for run in job.copy_runs:
        for side, name in (("src", "gather"), ("dst", "scatter")):
            _compare(job, run, side)
            made = BlockCopy(run, job.copy_bytes, job.torch_device, side)
            seconds = seconds_of(job, made.queue)
            plain = seconds_of(job, partial(made.images.copy_, made.pool))
            speed = made.pool.nbytes / seconds / 1e9
            figures.append(Figure(f"{name}, runs of {run:,} B", f"{speed:.1f} GB/s"))
            figures.append(
                ratio_figure(f"{name}, runs of {run:,} B: ratio to a device copy", plain / seconds, least)
            )
    return judged("gather and scatter", f"Every byte is right, copied by {way()}.", figures)


def _compare(job: GpuCheckJob, run: int, side: str) -> None:
    """Raise `TransferError` unless the device's copies write the same bytes as the host's.

    Args:
        job: device and sizes.
        run: length of a run in bytes.
        side: ``src`` to gather, ``dst`` to scatter.
    """
    size = min(job.copy_bytes, _COMPARED_BYTES)
    found = BlockCopy(run, size, job.torch_device, side)
    wanted = BlockCopy(run, size, "cpu", side, AddressSpace)
    for copy in (found, wanted):
        copy.fill()
        copy.queue()
        copy.wait()
    if not torch.equal(found.copied.cpu(), wanted.copied):
        name = "gather" if side == "src" else "scatter"
        raise TransferError(f"a {name} of runs of {run} bytes wrote wrong bytes")


def way() -> str:
    """Return the name of the code that copies cells on the device."""
    if device_kernel.copy_cells_kernel is None:
        return f"torch ({device_kernel.WHY_NO_KERNEL})"
    return "the Triton kernel"
