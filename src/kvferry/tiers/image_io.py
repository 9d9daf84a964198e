"""A chunk in memory to a file and back, with its checksums; digesting goes on while bytes move.

What is small is digested before it is written, or after it was read: a thread of its own would take longer.
"""

from __future__ import annotations

from functools import partial

from kvferry.tiers.beside import Arriving, Beside
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
    if body.nbytes <= PIECE_BYTES:
        header[:] = header_of(chunk, body)
        write_all(fd, (header, body))
        return
    with Beside(partial(header_of, chunk, body)) as digesting:
        write_all(fd, [body], len(header))
    header[:] = digesting.result()
    write_all(fd, [header])


def read_image(fd: int, chunk: Chunk, into: memoryview) -> bool:
    """Read a chunk from its file; says whether the file begins with its image.

    Args:
        fd: of the file.
        chunk: what it should be.
        into: filled with the body, as long as the chunk's.

    Raises:
        OSError: it cannot be read.
    """
    header = whole_pages(chunk.offsets[0])
    if into.nbytes <= PIECE_BYTES:
        return read_all(fd, (header, into)) == chunk.file_bytes and is_image(chunk, header, into)
    arriving = Arriving()
    with Beside(partial(_read, fd, header, into, arriving)) as reading:
        good = is_image(chunk, header, into, arriving.wait)
    return reading.result() == chunk.file_bytes and good


def _read(fd: int, header: memoryview, into: memoryview, arriving: Arriving) -> int:
    """Read in pieces, as far as the file goes, and say how far."""
    try:
        done = read_all(fd, [header, into[:PIECE_BYTES]])
        arriving.has(done - len(header))
        for at in range(PIECE_BYTES, into.nbytes, PIECE_BYTES):
            if done < len(header) + at:
                break
            done += read_all(fd, [into[at : at + PIECE_BYTES]], done)
            arriving.has(done - len(header))
    finally:
        arriving.end()
    return done
