"""Functions that write, read and verify open chunk files. They block, and any thread may call them.

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

STORAGE_PIECE_BYTES = 4 << 20
"""Bytes per read if a file comes from a disk or a network, which are faster with fewer, larger reads."""
MEMORY_BYTES_PER_SECOND = 4e9
"""Read speed from which a file is assumed to come from memory, such as the page cache."""


def write_chunk(fd: int, chunk: Chunk, body: memoryview) -> None:
    """Write the header and the body of a chunk to an empty file.

    Args:
        fd: descriptor of the file, open for writing.
        chunk: identity and layout of the chunk.
        body: writable memory with the sections of the chunk, each at a multiple of 4096 bytes. The padding
            after each section is set to zero.

    Raises:
        ChunkError: `body` does not have the length of the chunk's body.
        OSError: the file cannot be written completely.
    """
    zero_padding(chunk, body)
    header = whole_pages(chunk.offsets[0])
    header[:] = make_header(chunk, body)
    write_all(fd, (header, body))


def read_chunk(fd: int, chunk: Chunk, into: memoryview) -> bool:
    """Read a chunk from its file into memory. Return whether the file begins with exactly the expected chunk.

    If the result is False, the content of `into` must not be used, and `explain_refusal` finds the reason.

    Args:
        fd: descriptor of the file.
        chunk: identity and layout of the expected chunk.
        into: writable memory for the content (body), of the size of the chunk's body.

    Raises:
        OSError: the file cannot be read.
    """
    reading = _ProgressiveRead(fd, whole_pages(chunk.offsets[0]), into)
    good = is_chunk(chunk, reading.header, into, reading.read_up_to)
    return reading.done == chunk.file_bytes and good


def explain_refusal(fd: int, chunk: Chunk, body: memoryview) -> None:
    """Raise an error that says why `read_chunk` returned False for a file.

    Return without an error in one case: the header of the file is valid and has the expected key, but it
    describes other KV cache groups, tokens or sections than the expected ones.

    Args:
        fd: descriptor of the file.
        chunk: identity and layout of the expected chunk.
        body: memory into which `read_chunk` read the body.

    Raises:
        ChunkError: the file is damaged, or contains the chunk of another key.
        OSError: the file cannot be read, or its header has changed since `read_chunk` read it.
    """
    set_direct(fd, on=False)
    header = read_header(fd)
    if (header.chunk.namespace, header.chunk.key) != (chunk.namespace, chunk.key):
        raise ChunkError(f"it holds the chunk of key {header.chunk.key.hex()}, expected {chunk.key.hex()}")
    if header.chunk != chunk:
        return
    check_body(header, body)
    raise OSError(errno.EIO, "the header changed between two reads")


def read_header(fd: int) -> ChunkHeader:
    """Read and decode the header of a chunk file, and check that the file has the length in the header.

    Args:
        fd: descriptor of the file.

    Raises:
        ChunkError: the file is not a complete chunk file.
        OSError: the file cannot be read.
    """
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
    """A reader of a chunk file that reads the file in pieces, each piece when its bytes are needed.

    Args:
        fd: descriptor of the file.
        header: writable memory for the header.
        into: writable memory for the body.

    Attributes:
        header: memory of the file's header, which the first read fills.
        done: number of bytes read so far, including the header.
    """

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
        """Read the header and the first piece of the body, and choose the size of the other pieces.

        The other pieces are larger if the first bytes arrived so slowly that they must have come from
        storage, and not from the page cache.

        Returns:
            The number of bytes read, and the number of bytes that this first read requested. The first number
            is smaller only if the file ends early.
        """
        began, piece = time.perf_counter(), self._into[:PIECE_BYTES]
        read = read_all(self._fd, (self.header, piece))
        if read < MEMORY_BYTES_PER_SECOND * (time.perf_counter() - began):
            self._piece_bytes = STORAGE_PIECE_BYTES
        return read, len(self.header) + len(piece)
