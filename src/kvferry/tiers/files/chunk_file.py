"""A chunk in memory to a file and back, with its checksums.

A chunk is digested piece by piece as it is read, while the processor's cache still has the piece.
"""

from __future__ import annotations

import time

from kvferry.tiers.files.direct_io import read_all, read_more, whole_pages, write_all
from kvferry.tiers.format.body import PIECE_BYTES, is_chunk, make_header, zero_padding
from kvferry.tiers.format.chunk import Chunk

STORAGE_PIECE_BYTES = 4 << 20
"""Bytes that are read at a time from a disk or a network, which take less time for fewer, larger pieces."""
MEMORY_BYTES_PER_SECOND = 4e9
"""Bytes come from memory, such as the page cache, if they come faster than this."""


def write_chunk(fd: int, chunk: Chunk, body: memoryview) -> None:
    """Write a chunk to an empty file.

    Args:
        fd: of the file.
        chunk: what it is.
        body: its sections, each from a page on; what lies between them is zeroed.

    Raises:
        ChunkError: the body has another length than the chunk's.
        OSError: it cannot be written; some may have been.
    """
    zero_padding(chunk, body)
    header = whole_pages(chunk.offsets[0])
    header[:] = make_header(chunk, body)
    write_all(fd, (header, body))


def read_chunk(fd: int, chunk: Chunk, into: memoryview) -> bool:
    """Read a chunk from its file; return whether the file begins with its image.

    Args:
        fd: of the file.
        chunk: what it should be.
        into: filled with the body, as long as the chunk's.

    Raises:
        OSError: it cannot be read.
    """
    reading = _ProgressiveRead(fd, whole_pages(chunk.offsets[0]), into)
    good = is_chunk(chunk, reading.header, into, reading.read_up_to)
    return reading.done == chunk.file_bytes and good


class _ProgressiveRead:
    """A file that is read as its bytes are needed.

    Attributes:
        header: filled with the file's header by the first read.
        done: bytes read so far; no more come once the file has ended.
    """

    def __init__(self, fd: int, header: memoryview, into: memoryview) -> None:
        self.header, self.done = header, 0
        self._fd, self._into, self._ended = fd, into, False
        self._piece_bytes = PIECE_BYTES

    def read_up_to(self, size: int) -> None:
        """Read on until so many bytes of the body are there, or the file has ended."""
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
        """Read the header and a first piece; bytes read, and bytes wanted."""
        began, piece = time.perf_counter(), self._into[:PIECE_BYTES]
        read = read_all(self._fd, (self.header, piece))
        if read < MEMORY_BYTES_PER_SECOND * (time.perf_counter() - began):
            self._piece_bytes = STORAGE_PIECE_BYTES
        return read, len(self.header) + len(piece)
