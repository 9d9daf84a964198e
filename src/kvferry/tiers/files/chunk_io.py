"""Reading chunk files through a descriptor. Blocks; any thread may do it."""

from __future__ import annotations

import os
from functools import partial

from kvferry.tiers.files.direct_io import set_direct
from kvferry.tiers.format import decode
from kvferry.tiers.format.checksum import Buffer
from kvferry.tiers.format.decode import ChunkHeader


def read_header(fd: int) -> ChunkHeader:
    """The header of a file, whose length is what it says.

    Raises:
        ChunkError: it is no chunk file, or not a whole one.
        OSError: it cannot be read.
    """
    return decode.read_header(partial(read, fd), os.fstat(fd).st_size)


def verify_file(fd: int) -> ChunkHeader:
    """Read and check every byte of a file, through the page cache.

    Raises:
        ChunkError: some byte is not what was written.
        OSError: it cannot be read.
    """
    set_direct(fd, on=False)
    return decode.verify(partial(read, fd), os.fstat(fd).st_size)


def read(fd: int, offset: int, size: int) -> Buffer:
    """`size` bytes from `offset` on, or fewer where the file ends.

    Raises:
        OSError: they cannot be read.
    """
    data = b""
    while len(data) < size and (piece := os.pread(fd, size - len(data), offset + len(data))):
        data += piece
    return data
