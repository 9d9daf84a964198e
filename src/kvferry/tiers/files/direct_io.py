"""Direct I/O between memory and files, with the page cache as a fallback.

Chunks that are used again soon are in the host tier. A copy in the page cache would take CPU time and evict
pages that others need. All functions that read or write block, and any thread may call them.
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
    # numpy, because a bytearray would be zeroed first.
    spare = np.empty(size + ALIGNMENT, np.uint8)
    first = -spare.__array_interface__["data"][0] % ALIGNMENT
    return spare.data[first : first + size]


def write_all(fd: int, pieces: Sequence[Buffer]) -> None:
    """Write buffers one after another, from the beginning of a file."""
    written = _transfer(fd, pieces, lambda left, at: os.pwritev(fd, left, at))
    if written < (size := sum(memoryview(piece).nbytes for piece in pieces)):
        raise OSError(errno.EIO, f"writing stopped after {written} of {size} bytes")


def read_all(fd: int, pieces: Sequence[Buffer], begin: int = 0) -> int:
    """Fill buffers from a file, from offset `begin`. Return the bytes read: fewer only if the file ends."""
    return _transfer(fd, pieces, lambda left, at: os.preadv(fd, left, begin + at))


def read_more(fd: int, piece: memoryview, begin: int) -> int:
    """Fill a buffer from offset `begin` after a call of `read_all`. Return the bytes read, as it does."""
    try:
        # Direct I/O is as `read_all` left it, which saves two system calls per piece.
        read = os.preadv(fd, [piece], begin)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        read = 0
    return read if read == len(piece) else read + read_all(fd, [piece[read:]], begin + read)


def set_direct(fd: int, *, on: bool) -> bool:
    """Turn direct I/O on or off for a file. Return whether it is on now.

    Other flags of the descriptor, such as O_APPEND and O_NONBLOCK, are cleared.
    """
    if not hasattr(os, "O_DIRECT"):
        return False  # macOS
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT if on else 0)
    except OSError:
        return False
    return on


def _transfer(fd: int, pieces: Sequence[Buffer], move: Callable[[Sequence[memoryview], int], int]) -> int:
    """Read or write buffers with direct I/O; return the bytes moved.

    Args:
        move: read or write some bytes and return their number. It gets the remaining buffers and the number
            of bytes moved so far. 0 ends the transfer.
    """
    left, done = [memoryview(piece).cast("B") for piece in pieces], 0
    direct = set_direct(fd, on=True)
    while left:
        try:
            moved = move(left, done)
        except OSError as error:
            if not (direct and error.errno == errno.EINVAL):
                raise
            # Address or length of the memory is not a multiple of the device's block size, which may exceed
            # a page. The rest goes through the page cache.
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
