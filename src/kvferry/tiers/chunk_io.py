"""Reading and writing the bytes of chunk files through a descriptor. Blocks; any thread may do it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvferry.errors import ChunkError
from kvferry.tiers.checksum import Buffer
from kvferry.tiers.decode import Header, check_length, decode_header, header_span, verify
from kvferry.tiers.format import ALIGNMENT

# One call takes no more buffers than this (IOV_MAX of Linux).
_BUFFERS = 1024


def write_all(fd: int, pieces: Sequence[Buffer]) -> None:
    """Write all bytes of `pieces`, one after another.

    Raises:
        OSError: they cannot be written; some may have been.
    """
    left = [memoryview(piece).cast("B") for piece in pieces]
    while left:
        written = os.writev(fd, left[:_BUFFERS])
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = left[0][written:]


def read_into(fd: int, offset: int, into: Buffer) -> None:
    """Fill `into` from `offset` on.

    Raises:
        ChunkError: the file ends before.
        OSError: it cannot be read.
    """
    view = memoryview(into).cast("B")
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done:]], offset + done)
        if not count:
            raise ChunkError(f"a file that ends at {offset + done}; expected {len(view) - done} more bytes")
        done += count


def read_header(fd: int) -> Header:
    """The header of a file, whose length is what it says.

    Raises:
        ChunkError: it is no chunk file, or not a whole one.
        OSError: it cannot be read.
    """
    start = os.pread(fd, ALIGNMENT, 0)
    span = header_span(start)
    if span > len(start):
        start += os.pread(fd, span - len(start), len(start))
    header = decode_header(start)
    check_length(header, os.fstat(fd).st_size)
    return header


def verify_file(fd: int) -> Header:
    """Read and check every byte of a file.

    Raises:
        ChunkError: some byte is not what was written.
        OSError: it cannot be read.
    """
    header = read_header(fd)
    return verify(lambda at, size: _read(fd, at, size), header.chunk.file_bytes)


def _read(fd: int, offset: int, size: int) -> Buffer:
    data = bytearray(size)
    read_into(fd, offset, data)
    return data
