"""Copy cells between a block pool on a GPU and packed memory: staging memory, or registered host memory.

The *kernel* (`device_kernel`) copies all cells of a strided copy in one launch, whatever their runs. The
GPU's *copy engine* takes one call per run. Without Triton it copies everything.

Copies are queued on the calling thread's current stream (`device_stream`). Nothing here waits for them.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import torch

from kvferry.common.errors import TransferError
from kvferry.common.units import format_bytes
from kvferry.geometry import Region
from kvferry.memory import device_kernel
from kvferry.memory.host_copy import CellViews, CopyView, check_bounds
from kvferry.planning.descriptors import Int64s

# Words that a program of the kernel copies at a time, and its warps.
_TILE_WORDS, _WARPS = 2048, 8
# Programs per streaming multiprocessor for copies inside of a GPU.
_PROGRAMS_PER_CORE = 4
# Between GPU and host, more programs would take cores from the engine, for no more speed.
_HOST_PROGRAMS = 16
# Programs where Triton's interpreter runs the kernel.
_CPU_PROGRAMS = 3
_LARGEST_WORD, _LARGEST_UNIT = 8, 16


def copy_cells_on_device(
    part: CellViews, places: Int64s, memory: torch.Tensor, offsets: Int64s, engine_bytes: int
) -> None:
    """Queue copies of cells between a block pool on a GPU and packed memory, as `PoolCells.copy` does."""
    if not len(places):
        return
    # All of them first: an error must leave nothing copied.
    for view in part.copies:
        check_bounds("places of the block pool", places, 0, len(view.elements))
        check_bounds("bytes of the packed memory", offsets + view.offset, 0, len(memory) - view.extent + 1)
    cells: dict[int, torch.Tensor] = {}
    for view in part.copies:
        stride = view.elements.stride(0) * view.word
        bits = memory.data_ptr() | int(np.bitwise_or.reduce(places * stride | offsets))
        if bits % view.word:
            raise TransferError(f"packed cells do not begin at whole words of {view.word} bytes")
        words = memory[: len(memory) // view.word * view.word].view(view.elements.dtype)
        to_or_from_host = view.elements.is_cuda and not memory.is_cuda
        if uses_copy_engine(view.copy.run, engine_bytes, to_or_from_host=to_or_from_host):
            _copy_by_engine(view, places, words, offsets)
            continue
        # Most copies of a cell have one stride, so one upload is enough.
        if stride not in cells:
            cells[stride] = torch.from_numpy(np.stack([places * stride, offsets]))
            if view.elements.is_cuda:
                # Queued like the copies that use it.
                cells[stride] = cells[stride].pin_memory().to(view.elements.device, non_blocking=True)
        packed = words[view.offset // view.word :]
        _launch(view, packed, cells[stride], copy_unit(view, bits), len(places))


def uses_copy_engine(run: int, engine_bytes: int, *, to_or_from_host: bool) -> bool:
    """Return whether the GPU's copy engine copies runs of a length in bytes, and not the kernel."""
    # With long runs it reaches the full speed of the bus, and leaves the GPU's cores to the engine.
    return device_kernel.copy_cells_kernel is None or (to_or_from_host and run >= engine_bytes)


def compile_kernel(view: CopyView) -> None:
    """Compile the kernel for a strided copy, so that its first transfer need not wait for it."""
    if device_kernel.copy_cells_kernel is not None:
        device = view.elements.device
        packed = torch.zeros(2 * _LARGEST_UNIT, dtype=torch.uint8, device=device)
        first = view.offset % _LARGEST_UNIT // view.word
        nothing = torch.zeros((2, 1), dtype=torch.int64, device=device)
        _launch(view, packed.view(view.elements.dtype)[first:], nothing, copy_unit(view, 0), 0)


def _launch(view: CopyView, packed: torch.Tensor, cells: torch.Tensor, unit: int, count: int) -> None:
    """Launch the kernel on the calling thread's current stream.

    Args:
        packed: words of packed memory. It begins at the first run of a cell with offset 0.
        cells: byte offset of each cell in the pool, and in `packed`, int64 of shape (2, n), on the GPU.
        unit: bytes that divide all offsets and strides.
        count: number of cells to copy; 0 only compiles the kernel.
    """
    pool = view.elements
    words = view.copy.run // view.word
    columns = min(_power_of_two(words), _TILE_WORDS)
    rows = min(_power_of_two(view.copy.run_count), _TILE_WORDS // columns)
    column_tiles = -(-words // columns)
    tiles = -(-view.copy.run_count // rows) * column_tiles
    here, there = (pool, cells[0]), (packed, cells[1])
    (source, source_cells), (destination, destination_cells) = (
        (here, there) if view.storing else (there, here)
    )
    grid = (max(1, min(count * tiles, _programs(pool, packed))),)
    with torch.cuda.device(pool.device) if pool.is_cuda else nullcontext():
        device_kernel.copy_cells_kernel[grid](
            source, destination, source_cells, destination_cells, view.device_loops, words,
            count * tiles, tiles, column_tiles,
            LOOPS=len(view.loops), ROWS=rows, COLUMNS=columns, WORD=view.word, UNIT=unit, num_warps=_WARPS,
        )  # fmt: skip


def _copy_by_engine(view: CopyView, places: Int64s, words: torch.Tensor, offsets: Int64s) -> None:
    """Queue one copy per run for the copy engine of the GPU."""
    strides = [stride // view.word for stride in view.strides]
    for place, offset in zip(places.tolist(), offsets.tolist(), strict=True):
        cell = view.elements[place]
        packed = words.as_strided(view.shape, strides, (offset + view.offset) // view.word)
        source, destination = (cell, packed) if view.storing else (packed, cell)
        for run in np.ndindex(view.shape[:-1]):
            # One contiguous run per call. A copy of several would go through a temporary tensor.
            destination[run].copy_(source[run], non_blocking=True)


def copy_unit(view: CopyView, bits: int) -> int:
    """Return the bytes that the kernel copies at a time: 16 if everything is a multiple of 16, else a word.

    `bits` is the bitwise or of the address of packed memory and of the byte offsets of all cells.
    """
    strides = int(np.bitwise_or.reduce(view.loops[:, 1:].reshape(-1), initial=0))
    bits |= strides | view.elements.data_ptr() | view.offset | view.copy.run
    return _LARGEST_UNIT if view.word == _LARGEST_WORD and not bits % _LARGEST_UNIT else view.word


def _programs(pool: torch.Tensor, packed: torch.Tensor) -> int:
    if not pool.is_cuda:
        return _CPU_PROGRAMS
    if not packed.is_cuda:
        return _HOST_PROGRAMS
    cores = torch.cuda.get_device_properties(pool.device).multi_processor_count
    return int(cores) * _PROGRAMS_PER_CORE


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


# Flags of cudaHostRegister: for all CUDA contexts of the process, and mapped into their addresses.
_PORTABLE_AND_MAPPED = 3


class HostRegistration:
    """Host memory, from a page on, that is registered with CUDA until `close`, and stays mapped until then.

    Several processes may register the same shared memory, each for itself.
    """

    def __init__(self, memory: Region) -> None:
        self._address = memory.address
        cudart = torch.cuda.cudart()
        code = cudart.cudaHostRegister(memory.address, memory.length, _PORTABLE_AND_MAPPED).value
        if code:
            self._address = 0
            raise TransferError(
                f"CUDA cannot register {format_bytes(memory.length)} of host memory (error {code}); lower "
                "the capacity of the host tier or staging_mib, or raise ulimit -l and the container's memory "
                "limit"
            )

    def close(self) -> None:
        """End the registration. No copy of the memory may be in progress. Idempotent."""
        if self._address:
            torch.cuda.cudart().cudaHostUnregister(self._address)
            self._address = 0
