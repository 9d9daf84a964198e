"""Measure copies between scattered KV blocks and packed memory, through `host_copy.copy_cells`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.common.errors import ConfigError
from kvferry.geometry import Region
from kvferry.memory import copy_kernel
from kvferry.memory.address_space import AddressSpace
from kvferry.memory.host_copy import CopyView, copy_cells
from kvferry.memory.pool_cells import PoolCells
from kvferry.planning.cell_copy import ONE_CELL, PoolCopies
from kvferry.planning.descriptors import Int64s
from kvferry.planning.strided_copy import Loop, StridedCopy
from kvferry.tools.measuring.rounds import Spread

_HEADS, _HEAD_ELEMENTS = 8, 128
_POOL_COPIES = 8
"""Size of the pool, as a multiple of the bytes of a copy: blocks of one copy are scattered over it."""


@dataclass(frozen=True, slots=True)
class CopyCase:
    """One kind of copy: a page of 8 heads in the pool, and its heads one after another in packed memory.

    Attributes:
        name: name for the report.
        tokens: tokens of a block.
        run: bytes of a run that is contiguous on both sides. For transposed keys this is one element.
        transposed: True if the pool keeps a head's tokens innermost, and packed memory its elements.
    """

    name: str
    tokens: int
    run: int
    transposed: bool = False

    @property
    def cell_bytes(self) -> int:
        """Return the bytes of a block, equal on both sides."""
        return _HEADS * self.tokens * self.run * (_HEAD_ELEMENTS if self.transposed else 1)

    @property
    def loops(self) -> tuple[Loop, ...]:
        """Return the loops of the copy of a block from the pool to packed memory."""
        run, tokens = self.run, self.tokens
        if self.transposed:
            head = tokens * _HEAD_ELEMENTS * run
            return (
                Loop(_HEADS, head, head),
                Loop(tokens, run, _HEAD_ELEMENTS * run),
                Loop(_HEAD_ELEMENTS, tokens * run, run),
            )
        return (Loop(_HEADS, run, tokens * run), Loop(tokens, _HEADS * run, run))


CASES = (
    *(CopyCase(f"runs of {run:,} B", 16, run) for run in (128, 256, 512, 2048, 8192)),
    *(
        CopyCase(f"K of {run} bytes, {tokens} tokens", tokens, run, transposed=True)
        for run in (2, 4)
        for tokens in (16, 32, 128)
    ),
)


@dataclass(frozen=True, slots=True)
class CopyTimes:
    """The times of one kind of copy in one direction.

    Attributes:
        case: kind of copy.
        storing: True if blocks were copied to packed memory (a gather), False for the way back (a scatter).
        copied_bytes: bytes of a copy.
        seconds: time of each round, by ``"numpy"``, ``"kernel"`` and ``"memcpy"``.
    """

    case: CopyCase
    storing: bool
    copied_bytes: int
    seconds: dict[str, list[float]]

    def speed(self, by: str) -> float:
        """Return the median speed in bytes per second."""
        return self.copied_bytes / Spread.of(self.seconds[by]).median

    def ratio(self, to: str) -> Spread:
        """Return the kernel's speed as a multiple of another's, round by round."""
        return Spread.of([b / a for a, b in zip(self.seconds["kernel"], self.seconds[to], strict=True)])


def measure(copied_bytes: int, repeats: int, progress: Callable[[str], None]) -> tuple[CopyTimes, ...]:
    """Measure all cases in both directions. A round uses the kernel, numpy and memcpy in random order.

    Args:
        copied_bytes: bytes of a copy; a case copies as many whole blocks as fit.
        repeats: number of rounds.
        progress: function that is called with a line of text for each case.

    Raises:
        ConfigError: this installation has no kernel.
    """
    if copy_kernel.KERNEL is None:
        raise ConfigError(f"there is no copy kernel to measure: {copy_kernel.WHY_NO_KERNEL}")
    pool, packed = (np.ones(size, np.uint8) for size in (copied_bytes * _POOL_COPIES, copied_bytes))
    draw = np.random.default_rng(0)
    found = []
    for case in CASES:
        progress(f"copying {case.name}")
        for storing in (True, False):
            view = _view(case, pool, storing=storing)
            count = copied_bytes // case.cell_bytes
            offsets = np.arange(count) * case.cell_bytes
            seconds: dict[str, list[float]] = {"numpy": [], "kernel": [], "memcpy": []}
            for _ in range(1 + repeats):
                for by in draw.permutation(list(seconds)):
                    places = draw.permutation(len(pool) // case.cell_bytes)[:count]
                    seconds[by].append(_timed(by, view, places, packed, offsets, pool))
            for times in seconds.values():
                del times[0]  # the first round also brings memory and code into caches
            found.append(CopyTimes(case, storing, count * case.cell_bytes, seconds))
    return tuple(found)


def _timed(
    by: str,
    view: CopyView,
    places: Int64s,
    packed: npt.NDArray[np.uint8],
    offsets: Int64s,
    pool: npt.NDArray[np.uint8],
) -> float:
    """Copy once, and return the seconds.

    Args:
        by: ``"numpy"``, ``"kernel"`` or ``"memcpy"``; memcpy copies as many contiguous bytes.
        view: strided copy, with its view of the pool.
        places: index of each block in the pool, int64 of shape (n,).
        packed: packed memory.
        offsets: byte offset of each block in `packed`, int64 of shape (n,).
        pool: the pool's memory.
    """
    size = len(offsets) * view.copy.bytes
    start = int(places[0]) * view.copy.bytes % (len(pool) - size)
    there, here = pool[start : start + size], packed[:size]
    kernel = copy_kernel.KERNEL
    copy_kernel.KERNEL = kernel if by == "kernel" else None  # without a kernel, `copy_cells` uses numpy
    try:
        began = time.perf_counter()
        if by != "memcpy":
            copy_cells(view, places, packed, offsets)
        elif view.storing:
            np.copyto(here, there)
        else:
            np.copyto(there, here)
        return time.perf_counter() - began
    finally:
        copy_kernel.KERNEL = kernel


def _view(case: CopyCase, pool: npt.NDArray[np.uint8], *, storing: bool) -> CopyView:
    address, size = pool.ctypes.data, case.cell_bytes
    loops = case.loops if storing else tuple(Loop(one.count, one.dst, one.src) for one in case.loops)
    copy = StridedCopy(address if storing else 0, 0 if storing else address, case.run, loops)
    space = AddressSpace([Region(address, pool.size, "DRAM", 0)])
    side = "src" if storing else "dst"
    part = PoolCopies(ONE_CELL, (copy,))
    (views,) = PoolCells([part], space, side=side, stride=size, blocks=pool.size // size).parts
    return views.copies[0]
