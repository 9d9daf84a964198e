"""Bytes between memory and files, past the page cache where that can be. Blocks; any thread may do it.

What lies in whole pages of memory is moved by the device itself (direct I/O): chunks that are used again soon
are in host memory, and a copy of each in the page cache would cost a core's time and push out what others
need there. What a file system refuses to move so goes through the page cache.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Sequence

import numpy as np

from kvferry.tiers.format.checksum import Buffer
from kvferry.tiers.format.chunk import ALIGNMENT


def whole_pages(size: int) -> memoryview:
    """New memory of `size` bytes, a multiple of 4096, that begins at a page; nobody has written to it."""
    spare = np.empty(size + ALIGNMENT, np.uint8)
    first = -spare.__array_interface__["data"][0] % ALIGNMENT
    return spare.data[first : first + size]


def write_all(fd: int, pieces: Sequence[Buffer], begin: int = 0) -> None:
    """Write `pieces`, one after another.

    Args:
        fd: of a file.
        pieces: what is written.
        begin: where in the file.

    Raises:
        OSError: they cannot be written; some may have been.
    """
    written = _transfer(fd, pieces, lambda left, at: os.pwritev(fd, left, begin + at))
    if written < (size := sum(memoryview(piece).nbytes for piece in pieces)):
        raise OSError(errno.EIO, f"writing stopped after {written} of {size} bytes")


def read_all(fd: int, pieces: Sequence[Buffer], begin: int = 0) -> int:
    """Fill `pieces`, one after another.

    Args:
        fd: of a file.
        pieces: what is filled.
        begin: where in the file.

    Returns:
        Bytes read: all, or fewer where the file ends before.

    Raises:
        OSError: it cannot be read.
    """
    return _transfer(fd, pieces, lambda left, at: os.preadv(fd, left, begin + at))


def read_more(fd: int, piece: memoryview, begin: int) -> int:
    """Fill a piece of memory from a file from which `read_all` has read before; see there.

    Takes less time than `read_all` where the page cache has what is read.
    """
    try:
        read = os.preadv(fd, [piece], begin)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        read = 0
    return read if read == len(piece) else read + read_all(fd, [piece[read:]], begin + read)


def set_direct(fd: int, *, on: bool) -> bool:
    """Have a file go past the page cache, or through it; says whether it goes past it now.

    Of a file that was opened without other flags that can be set later (O_APPEND, O_NONBLOCK).
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT if on else 0)
    except OSError:
        return False
    return on


def _transfer(fd: int, pieces: Sequence[Buffer], move: Callable[[Sequence[memoryview], int], int]) -> int:
    """Move all of `pieces`, or up to where nothing more is moved; returns how many bytes that were."""
    left, done = [memoryview(piece).cast("B") for piece in pieces], 0
    direct = set_direct(fd, on=True)
    while left:
        try:
            moved = move(left, done)
        except OSError as error:
            if not (direct and error.errno == errno.EINVAL):
                raise
            # Memory or a length that is not in whole blocks, or larger blocks than pages.
            direct = set_direct(fd, on=False)
            continue
        if not moved:
            break
        done += moved
        while left and moved >= len(left[0]):
            moved -= len(left.pop(0))
        if left:
            left[0] = left[0][moved:]
    return done
