"""Reading chunk files through a descriptor. Blocks; any thread may do it."""

from __future__ import annotations

import os

from kvferry.tiers.checksum import Buffer
from kvferry.tiers.decode import Header, check_length, decode_header, header_span, verify
from kvferry.tiers.direct_io import set_direct
from kvferry.tiers.format import ALIGNMENT


def read_header(fd: int) -> Header:
    """The header of a file, whose length is what it says.

    Raises:
        ChunkError: it is no chunk file, or not a whole one.
        OSError: it cannot be read.
    """
    header = decode_header(_read(fd, 0, header_span(_read(fd, 0, ALIGNMENT))))
    check_length(header, os.fstat(fd).st_size)
    return header


def verify_file(fd: int) -> Header:
    """Read and check every byte of a file, through the page cache.

    Raises:
        ChunkError: some byte is not what was written.
        OSError: it cannot be read.
    """
    set_direct(fd, on=False)
    header = read_header(fd)
    return verify(lambda at, size: _read(fd, at, size), header.chunk.file_bytes)


def _read(fd: int, offset: int, size: int) -> Buffer:
    """`size` bytes from `offset` on, or fewer where the file ends."""
    data = b""
    while len(data) < size and (piece := os.pread(fd, size - len(data), offset + len(data))):
        data += piece
    return data
