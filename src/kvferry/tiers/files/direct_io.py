"""Direct I/O between memory and files, with the page cache as a fallback.

With direct I/O, the device copies data to or from whole pages of memory, without the page cache. Chunks that
are used again soon are in the host tier. A copy in the page cache would take CPU time and evict pages that
others need. If the file system refuses direct I/O for some data, this data goes through the page cache.

All functions that read or write block. Any thread may call them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence

import numpy as np

from kvferry.operating_system import fcntl
from kvferry.tiers.format.checksum import Buffer
from kvferry.tiers.format.chunk import ALIGNMENT


def whole_pages(size: int) -> memoryview:
    """Return new, uninitialised memory of `size` bytes that begins at a page boundary."""
    spare = np.empty(size + ALIGNMENT, np.uint8)
    first = -spare.__array_interface__["data"][0] % ALIGNMENT
    return spare.data[first : first + size]


def write_all(fd: int, pieces: Sequence[Buffer]) -> None:
    """Write buffers one after another, from the beginning of a file.

    Args:
        fd: descriptor of the file.
        pieces: buffers to write.

    Raises:
        OSError: the pieces cannot be written completely.
    """
    written = _transfer(fd, pieces, lambda left, at: os.pwritev(fd, left, at))
    if written < (size := sum(memoryview(piece).nbytes for piece in pieces)):
        raise OSError(errno.EIO, f"writing stopped after {written} of {size} bytes")


def read_all(fd: int, pieces: Sequence[Buffer], begin: int = 0) -> int:
    """Fill buffers one after another from a file.

    Args:
        fd: descriptor of the file.
        pieces: writable buffers to fill.
        begin: offset in the file at which to begin, in bytes.

    Returns:
        The number of bytes read. The number is less than the size of the buffers only if the file ends.

    Raises:
        OSError: the file cannot be read.
    """
    return _transfer(fd, pieces, lambda left, at: os.preadv(fd, left, begin + at))


def read_more(fd: int, piece: memoryview, begin: int) -> int:
    """Read another part of a file after a call of `read_all`, and return the number of bytes read.

    The function first tries one read with direct I/O on or off as the call of `read_all` left it. It calls
    `read_all` again only if this read fails or is short.

    Args:
        fd: descriptor of the file.
        piece: writable buffer to fill.
        begin: offset in the file at which to begin, in bytes.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        read = os.preadv(fd, [piece], begin)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        read = 0
    return read if read == len(piece) else read + read_all(fd, [piece[read:]], begin + read)


def set_direct(fd: int, *, on: bool) -> bool:
    """Turn direct I/O (without the page cache) on or off for a file. Return whether direct I/O is on now.

    The call clears other flags of the descriptor, such as O_APPEND and O_NONBLOCK.
    """
    if not hasattr(os, "O_DIRECT"):
        return False  # macOS
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT if on else 0)
    except OSError:
        return False
    return on


def _transfer(fd: int, pieces: Sequence[Buffer], move: Callable[[Sequence[memoryview], int], int]) -> int:
    """Read or write buffers with direct I/O, or through the page cache if the file system refuses direct I/O.

    Args:
        fd: descriptor of the file.
        pieces: buffers to read or write, in order.
        move: function that reads or writes some bytes, and returns their number. Its arguments are the
            remaining buffers and the number of bytes moved so far. If it returns 0, the transfer ends.

    Returns:
        The number of bytes moved.
    """
    left, done = [memoryview(piece).cast("B") for piece in pieces], 0
    direct = set_direct(fd, on=True)
    while left:
        try:
            moved = move(left, done)
        except OSError as error:
            if not (direct and error.errno == errno.EINVAL):
                raise
            # Address or length of the memory is not a multiple of the block size, which may exceed a page.
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
