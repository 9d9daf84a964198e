"""A chunk in memory to a file and back, with its checksums.

A chunk is digested piece by piece as it is read, while the processor's cache still has the piece.
"""

from __future__ import annotations

from kvferry.tiers.direct_io import read_all, whole_pages, write_all
from kvferry.tiers.format import Chunk
from kvferry.tiers.image import PIECE_BYTES, header_of, is_image, pad


def write_image(fd: int, chunk: Chunk, body: memoryview) -> None:
    """Write a chunk to an empty file.

    Args:
        fd: of the file.
        chunk: what it is.
        body: its sections, each from a page on; what lies between them is zeroed.

    Raises:
        ChunkError: the body has another length than the chunk's.
        OSError: it cannot be written; some may have been.
    """
    pad(chunk, body)
    header = whole_pages(chunk.offsets[0])
    header[:] = header_of(chunk, body)
    write_all(fd, (header, body))


def read_image(fd: int, chunk: Chunk, into: memoryview) -> bool:
    """Read a chunk from its file; return whether the file begins with its image.

    Args:
        fd: of the file.
        chunk: what it should be.
        into: filled with the body, as long as the chunk's.

    Raises:
        OSError: it cannot be read.
    """
    reading = _Reading(fd, whole_pages(chunk.offsets[0]), into)
    good = is_image(chunk, reading.header, into, reading.read_up_to)
    return reading.done == chunk.file_bytes and good


class _Reading:
    """A file that is read as its bytes are needed.

    Attributes:
        header: filled with the file's header by the first read.
        done: bytes read so far; no more come once the file has ended.
    """

    def __init__(self, fd: int, header: memoryview, into: memoryview) -> None:
        self.header, self.done = header, 0
        self._fd, self._into, self._ended = fd, into, False

    def read_up_to(self, size: int) -> None:
        """Read on until so many bytes of the body are there, or the file has ended."""
        while self.done < len(self.header) + size and not self._ended:
            at = max(self.done - len(self.header), 0)
            wanted = [self._into[at : at + PIECE_BYTES]]
            if not self.done:
                wanted.insert(0, self.header)
            read = read_all(self._fd, wanted, self.done)
            self._ended = read < sum(len(piece) for piece in wanted)
            self.done += read
