"""Write, read and verify open chunk files. The functions block, and any thread may call them.

A chunk is read in pieces. Each piece is digested at once, while it is still in the CPU cache.
"""

from __future__ import annotations

import errno
import os
import time
from functools import partial

from kvferry.errors import ChunkError
from kvferry.tiers.files.direct_io import read_all, read_more, set_direct, whole_pages, write_all
from kvferry.tiers.format import decode
from kvferry.tiers.format.body import PIECE_BYTES, check_body, is_chunk, make_header, zero_padding
from kvferry.tiers.format.checksum import Buffer
from kvferry.tiers.format.chunk import Chunk
from kvferry.tiers.format.decode import ChunkHeader

# Disks and network mounts are faster with fewer, larger reads than memory.
STORAGE_PIECE_BYTES = 4 << 20
# A file that arrives at this speed comes from memory, such as the page cache.
MEMORY_BYTES_PER_SECOND = 4e9


def write_chunk(fd: int, chunk: Chunk, body: memoryview) -> None:
    """Write the header and the body of a chunk to an empty file.

    Args:
        body: sections of the chunk, each at a multiple of 4096 bytes. The padding after each is zeroed here.
    """
    zero_padding(chunk, body)
    header = whole_pages(chunk.offsets[0])
    header[:] = make_header(chunk, body)
    write_all(fd, (header, body))


def read_chunk(fd: int, chunk: Chunk, into: memoryview) -> bool:
    """Read a chunk into memory. Return whether the file is exactly the expected chunk.

    `into` has the size of the chunk's body. Its content is valid only if the result is True.
    """
    reading = _ProgressiveRead(fd, whole_pages(chunk.offsets[0]), into)
    # The digest pulls the pieces, so one pass over the memory is enough.
    good = is_chunk(chunk, reading.header, into, reading.read_up_to)
    return reading.done == chunk.file_bytes and good


def explain_refusal(fd: int, chunk: Chunk, body: memoryview) -> None:
    """Raise an error that says why `read_chunk` into `body` returned False.

    Return if the header is valid and has the expected key, but describes other groups, tokens or sections.

    Raises:
        ChunkError: the file is damaged, or contains the chunk of another key.
        OSError: the file cannot be read, or its header has changed since `read_chunk` read it.
    """
    # Headers are read at offsets and in sizes that direct I/O refuses.
    set_direct(fd, on=False)
    header = read_header(fd)
    if (header.chunk.namespace, header.chunk.key) != (chunk.namespace, chunk.key):
        raise ChunkError(f"it holds the chunk of key {header.chunk.key.hex()}, expected {chunk.key.hex()}")
    if header.chunk != chunk:
        return
    check_body(header, body)
    raise OSError(errno.EIO, "the header changed between two reads")


def read_header(fd: int) -> ChunkHeader:
    """Return the header of a chunk file, or raise ChunkError if the file is damaged or cut off."""
    return decode.read_header(partial(read, fd), os.fstat(fd).st_size)


def read(fd: int, offset: int, size: int) -> Buffer:
    """Return the `size` bytes at `offset` of a file, or fewer if the file ends earlier.

    Raises:
        OSError: the bytes cannot be read.
    """
    data = b""
    while len(data) < size and (piece := os.pread(fd, size - len(data), offset + len(data))):
        data += piece
    return data


class _ProgressiveRead:
    """Reads a file in pieces, each when its bytes are needed. `done` counts bytes, the header's included."""

    def __init__(self, fd: int, header: memoryview, into: memoryview) -> None:
        self.header, self.done = header, 0
        self._fd, self._into, self._ended = fd, into, False
        self._piece_bytes = PIECE_BYTES

    def read_up_to(self, size: int) -> None:
        """Read the file until the first `size` bytes of the body are in memory, or until the file ends."""
        while self.done < len(self.header) + size and not self._ended:
            if self.done:
                at = self.done - len(self.header)
                piece = self._into[at : at + self._piece_bytes]
                read, wanted = read_more(self._fd, piece, self.done), len(piece)
            else:
                read, wanted = self._begin()
            self.done += read
            self._ended = read < wanted

    def _begin(self) -> tuple[int, int]:
        # Header and first piece in one read: a small chunk needs no other. Its speed decides the size of the
        # rest.
        began, piece = time.perf_counter(), self._into[:PIECE_BYTES]
        read = read_all(self._fd, (self.header, piece))
        if read < MEMORY_BYTES_PER_SECOND * (time.perf_counter() - began):
            self._piece_bytes = STORAGE_PIECE_BYTES
        return read, len(self.header) + len(piece)
