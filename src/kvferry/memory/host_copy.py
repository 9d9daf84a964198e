"""Views of the cells of a block pool, and copies between them and packed memory, both in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvferry.common.errors import TransferError
from kvferry.memory import copy_kernel
from kvferry.memory.image_digest import KEYS, digest_bytes
from kvferry.planning.descriptors import Int64s
from kvferry.planning.strided_copy import StridedCopy

_WORDS = {8: np.int64, 4: np.int32, 2: np.int16, 1: np.uint8}

# Bytes from which a copy is written past the CPU's caches, which it would fill.
STREAMED_BYTES = 1 << 18

# Bytes of a run from which it is digested where it lies. The kernel packs shorter ones faster than it digests
# them.
LONG_RUN_BYTES: Final = 64

# Bytes that are packed before they are digested, if a cell has no more: the CPU's cache still holds them.
_SCRATCH_BYTES = 512 << 10


@dataclass(frozen=True, slots=True, eq=False)
class CopyView:
    """A view of a block pool, for one strided copy between any cell and its place in packed memory."""

    copy: StridedCopy
    size: int  # in bytes of the copy of one cell
    storing: bool  # whether the pool is the source of the copy
    # Loops of the copy, sorted by descending stride in the pool, int64 of shape (loops, 3). A row is (count,
    # source stride in bytes, destination stride in bytes).
    loops: Int64s
    word: int  # size in bytes of an element of `elements`
    # View of the pool, of shape (places, count of every loop in `copy.loops`, elements of a run): an array
    # for host memory, a tensor for GPU memory.
    elements: Any
    device_loops: Any  # the loops in GPU memory, the innermost first; None for host memory
    offset: int  # byte offset of the first run in the cell outside the pool
    # Those of a view of that cell, in elements and in bytes.
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    extent: int  # bytes from the start of its first run to the end of its last


@dataclass(frozen=True, slots=True, eq=False)
class CellViews:
    """Views of a block pool through which a set of strided copies can be run for any cell."""

    block_places: int  # number of places from the start of one block to the start of the next
    # Number of places from the start of a block to each of its cells, int64 of shape (cells per block,).
    cell_places: Int64s
    copies: tuple[CopyView, ...]

    def places(self, blocks: Int64s, numbers: Int64s) -> Int64s:
        """Return the index of each cell on the first axis of `CopyView.elements`, int64.

        `numbers` count from the start of the prompt, and broadcast with the block ids.
        """
        return blocks * self.block_places + self.cell_places[numbers % len(self.cell_places)]


def copy_cells(
    view: CopyView,
    places: Int64s,
    memory: npt.NDArray[np.uint8],
    offsets: Int64s,
    streamed_bytes: int = STREAMED_BYTES,
) -> None:
    """Copy cells of a block pool in host memory, as `PoolCells.copy` does, by one strided copy.

    The native kernel writes `streamed_bytes` or more past the CPU's caches. After TransferError, for a cell
    outside the block pool or `memory`, nothing was copied.
    """
    if not len(places):
        return
    _check_arrays(view, places, memory, offsets)
    check_bounds("places of the block pool", places, 0, len(view.elements))
    check_bounds("bytes of the packed memory", offsets + view.offset, 0, memory.size - view.extent + 1)
    kernel = copy_kernel.KERNEL
    if kernel is None or len(view.loops) > copy_kernel.MAX_LOOPS:
        # Without a kernel, numpy copies one cell at a time.
        for place, offset in zip(places.tolist(), offsets.tolist(), strict=True):
            here, there = view.elements[place], packed_cell(view, memory, offset)
            source, destination = (here, there) if view.storing else (there, here)
            np.copyto(destination, source)
        return
    pool = view.elements.ctypes.data + places * view.elements.strides[0]
    packed = memory.ctypes.data + view.offset + offsets
    streamed = len(places) * view.size >= streamed_bytes
    sources, destinations = (pool, packed) if view.storing else (packed, pool)
    kernel.copy(sources, destinations, view.copy.run, view.loops, streamed)


def digest_cells(view: CopyView, places: Int64s, positions: Int64s) -> int:
    """Return the share of cells of a block pool in the digest of an image (`image_digest`).

    Args:
        view: view for a copy that fills its part of a packed cell without gaps.
        positions: bytes from the start of the image to each packed cell, int64 of shape (n,).

    Raise TransferError if a cell is outside the block pool.
    """
    if not len(places):
        return 0
    check_bounds("places of the block pool", places, 0, len(view.elements))
    positions = positions + view.offset
    if (kernel := copy_kernel.KERNEL) is not None and view.copy.run >= LONG_RUN_BYTES:
        sources = view.elements.ctypes.data + places * view.elements.strides[0]
        return kernel.digest(sources, positions, view.copy.run, view.loops, KEYS)
    size, digest = view.size, 0
    each = max(1, _SCRATCH_BYTES // size)
    scratch = np.empty((min(each, len(places)), size), np.uint8)
    for first in range(0, len(places), each):
        some = places[first : first + each]
        offsets = np.arange(len(some)) * size - view.offset
        copy_cells(view, some, scratch.reshape(-1), offsets, streamed_bytes=scratch.size + 1)
        digest += digest_bytes(scratch[: len(some)], positions[first : first + each])
    return digest


def packed_cell(view: CopyView, memory: npt.NDArray[np.uint8], offset: int) -> npt.NDArray[Any]:
    """Return a view of the bytes that a strided copy reads or writes in the packed cell at an offset."""
    return np.ndarray(view.shape, _WORDS[view.word], memory.data, offset + view.offset, view.strides)


def _check_arrays(view: CopyView, places: Int64s, memory: npt.NDArray[np.uint8], offsets: Int64s) -> None:
    """Raise `TransferError` if the native kernel, which checks nothing, cannot take the arrays."""
    if not (places.dtype == offsets.dtype == np.int64 and places.shape == offsets.shape == (len(places),)):
        raise TransferError(
            f"a copy has {places.dtype} places of shape {places.shape} and {offsets.dtype} offsets of shape "
            f"{offsets.shape}; expected int64, and one of each per cell"
        )
    if not memory.flags.c_contiguous or (view.storing and not memory.flags.writeable):
        raise TransferError("packed memory has gaps or is read-only; expected contiguous, writable memory")
    if min(view.strides) < 0:
        raise TransferError(f"strides of a packed cell are {view.strides}; expected none below 0")


def check_bounds(what: str, values: Int64s, low: int, high: int) -> None:
    """Raise `TransferError` unless all places or offsets in `what` are in the range ``[low, high)``."""
    least, most = int(values.min()), int(values.max())
    if least < low or most >= high:
        raise TransferError(
            f"a copy exceeds the {what}: found {least} to {most}, expected {low} to {high - 1}"
        )
