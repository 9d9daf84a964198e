"""A chunk in memory as a chunk file: the header before it, and whether what was read is one.

In memory a chunk is what `geometry.canonical` says: sections, each from a page on. That is the body of its
file, byte for byte, so it is written and read in one piece; only what pads its sections must be zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvferry.errors import ChunkError
from kvferry.geometry.canonical import CanonicalGroup
from kvferry.tiers.format.checksum import Buffer, digest_of, unit_digests
from kvferry.tiers.format.chunk import Chunk, ChunkGroup, ChunkSection, aligned, encode_header
from kvferry.tiers.format.decode import ChunkHeader, check_units

PIECE_BYTES = 2 << 20
"""Bytes of a body digested at a time: they stay in the processor's cache, and Python takes few steps."""


def chunk_group(group: CanonicalGroup, tokens: int) -> ChunkGroup:
    """A canonical group as the group of a chunk file.

    Args:
        group: what the chunk holds.
        tokens: of it; 0 of a snapshot.
    """
    sections = (
        ChunkSection(f"{one.axis or 'all'}.{one.total}", one.units, one.unit_bytes) for one in group.sections
    )
    return ChunkGroup(group.label, tokens, tuple(sections))


def zero_padding(chunk: Chunk, body: memoryview) -> None:
    """Write zeros between the sections of a body.

    Args:
        chunk: what the body is of.
        body: its sections, each from a page on; what lies between them is written.

    Raises:
        ChunkError: the body has another length than the chunk's.
    """
    check_size(chunk, body)
    for _, _, padding in _sections(chunk, body):
        padding[:] = bytes(len(padding))


def make_header(chunk: Chunk, body: memoryview) -> bytes:
    """The header of a file, with the digests of its body, which is padded.

    Raises:
        ChunkError: the body has another length than the chunk's.
    """
    check_size(chunk, body)
    return _header(chunk, body, lambda _: None)


def is_chunk(
    chunk: Chunk, header: Buffer, body: memoryview, wait: Callable[[int], object] = lambda _: None
) -> bool:
    """Whether header and body are, byte by byte, a file of this very chunk.

    A chunk has exactly one image, so its header is written anew and compared: nothing that the given one says
    is used for anything. Why they are none, `decode_header` and `check_body` say.

    Args:
        chunk: what the file should be.
        header: of the file; looked at when all of the body is there.
        body: of the file, as long as the chunk's.
        wait: returns when so many bytes of the body are there.
    """
    written = _header(chunk, body, wait)
    wait(len(body))
    # A comparison of `bytes` takes a thirtieth of one with a view.
    return written == bytes(header) and all(_is_zero(padding) for _, _, padding in _sections(chunk, body))


def check_body(header: ChunkHeader, body: memoryview) -> None:
    """See that a body is what was written, unit by unit, and nothing between its sections.

    Raises:
        ChunkError: it is not; says which unit.
    """
    check_size(header.chunk, body)
    for index, (section, content, padding) in enumerate(_sections(header.chunk, body)):
        check_units(header, index, 0, content)
        if not _is_zero(padding):
            raise ChunkError(f"bytes between sections after {section.name} that are not zero")


def check_size(chunk: Chunk, body: memoryview) -> None:
    """See that memory is as long as a chunk's body.

    Raises:
        ChunkError: it is not.
    """
    if body.nbytes != chunk.body_bytes:
        raise ChunkError(f"a body of {body.nbytes} bytes; the chunk's has {chunk.body_bytes}")


def _is_zero(padding: memoryview) -> bool:
    return bytes(padding) == bytes(len(padding))


def _header(chunk: Chunk, body: memoryview, wait: Callable[[int], object]) -> bytes:
    return encode_header(chunk, b"".join(_digests(chunk, body, wait)))


def _digests(chunk: Chunk, body: memoryview, wait: Callable[[int], object]) -> Iterator[bytes]:
    """Of the units of all sections, piece by piece, as they come."""
    view = body.cast("B")
    for section, offset in zip(chunk.sections, chunk.offsets, strict=True):
        begin, unit_bytes = offset - chunk.offsets[0], section.unit_bytes
        end = begin + section.total_bytes
        if unit_bytes < PIECE_BYTES:
            for at, stop in _pieces(begin, end, PIECE_BYTES // unit_bytes * unit_bytes):
                wait(stop)
                yield unit_digests(view[at:stop], unit_bytes)
            continue
        for first in range(begin, end, unit_bytes):
            yield digest_of(_arriving(view, first, first + unit_bytes, wait))


def _arriving(view: memoryview, begin: int, end: int, wait: Callable[[int], object]) -> Iterator[memoryview]:
    for at, stop in _pieces(begin, end, PIECE_BYTES):
        wait(stop)
        yield view[at:stop]


def _pieces(begin: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """Begins and ends of pieces of a range, each of `size` bytes but the last.

    >>> list(_pieces(10, 25, 10))
    [(10, 20), (20, 25)]
    """
    return ((at, min(at + size, end)) for at in range(begin, end, size))


def _sections(chunk: Chunk, body: memoryview) -> Iterator[tuple[ChunkSection, memoryview, memoryview]]:
    """Every section with its bytes, and those that pad it."""
    view = body.cast("B")
    for section, offset in zip(chunk.sections, chunk.offsets, strict=True):
        at = offset - chunk.offsets[0]
        end = at + section.total_bytes
        yield section, view[at:end], view[end : at + aligned(section.total_bytes)]
