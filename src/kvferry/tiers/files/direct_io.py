"""Direct I/O between memory and files, with the page cache as a fallback. Blocks; any thread may use it.

The device itself moves data in whole pages of memory (direct I/O). Chunks that are used again soon are in
host memory. Another copy in the page cache would cost a core's time and evict pages that others need. Data
that the file system refuses for direct I/O goes through the page cache.
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
    """Return new, uninitialised, page-aligned memory of `size` bytes, a multiple of 4096."""
    spare = np.empty(size + ALIGNMENT, np.uint8)
    first = -spare.__array_interface__["data"][0] % ALIGNMENT
    return spare.data[first : first + size]


def write_all(fd: int, pieces: Sequence[Buffer]) -> None:
    """Write `pieces` from the beginning of a file, one after another.

    Args:
        fd: descriptor of a file.
        pieces: buffers to write.

    Raises:
        OSError: the pieces cannot be written completely.
    """
    written = _transfer(fd, pieces, lambda left, at: os.pwritev(fd, left, at))
    if written < (size := sum(memoryview(piece).nbytes for piece in pieces)):
        raise OSError(errno.EIO, f"writing stopped after {written} of {size} bytes")


def read_all(fd: int, pieces: Sequence[Buffer], begin: int = 0) -> int:
    """Fill `pieces`, one after another.

    Args:
        fd: descriptor of a file.
        pieces: buffers to fill.
        begin: offset in the file, in bytes.

    Returns:
        The number of bytes read; fewer than requested only if the file ends.

    Raises:
        OSError: the file cannot be read.
    """
    return _transfer(fd, pieces, lambda left, at: os.preadv(fd, left, begin + at))


def read_more(fd: int, piece: memoryview, begin: int) -> int:
    """Fill a buffer from a file that `read_all` has read from before; return the bytes read.

    It is faster than `read_all` if the data is in the page cache.
    """
    try:
        read = os.preadv(fd, [piece], begin)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        read = 0
    return read if read == len(piece) else read + read_all(fd, [piece[read:]], begin + read)


def set_direct(fd: int, *, on: bool) -> bool:
    """Turn direct I/O on or off for a file; return whether it is on now.

    The call clears other flags that can be set after opening, such as O_APPEND and O_NONBLOCK.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT if on else 0)
    except OSError:
        return False
    return on


def _transfer(fd: int, pieces: Sequence[Buffer], move: Callable[[Sequence[memoryview], int], int]) -> int:
    """Move `pieces` until all are done or `move` returns 0; return the number of bytes moved."""
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
