"""A chunk's body in memory: create its header, check a body that was read.

In memory a chunk has the layout of `geometry.canonical`: sections that begin at page boundaries. These bytes
are also the body of its file, so a chunk is written and read in one piece. The padding between sections must
be zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvferry.errors import ChunkError
from kvferry.geometry.canonical import CanonicalGroup
from kvferry.tiers.format.checksum import Buffer, digest_of, unit_digests
from kvferry.tiers.format.chunk import Chunk, ChunkGroup, ChunkSection, aligned, encode_header
from kvferry.tiers.format.decode import ChunkHeader, check_units

PIECE_BYTES = 2 << 20
"""Bytes of a body digested at a time: small enough for the CPU cache, large enough for few calls."""


def chunk_group(group: CanonicalGroup, tokens: int) -> ChunkGroup:
    """Return the chunk-file group of a canonical group.

    Args:
        group: the canonical group of the chunk.
        tokens: number of its tokens; 0 for a snapshot.
    """
    sections = (
        ChunkSection(f"{one.axis or 'all'}.{one.total}", one.units, one.unit_bytes) for one in group.sections
    )
    return ChunkGroup(group.label, tokens, tuple(sections))


def zero_padding(chunk: Chunk, body: memoryview) -> None:
    """Write zeros between the sections of a body.

    Args:
        chunk: the chunk.
        body: its sections, each at a multiple of 4096 bytes; the padding between them is overwritten.

    Raises:
        ChunkError: the body has another length than the chunk's.
    """
    check_size(chunk, body)
    for _, _, padding in _sections(chunk, body):
        padding[:] = bytes(len(padding))


def make_header(chunk: Chunk, body: memoryview) -> bytes:
    """Return the header for a body whose padding is zero.

    Raises:
        ChunkError: the body has another length than the chunk's.
    """
    check_size(chunk, body)
    return _header(chunk, body, lambda _: None)


def is_chunk(
    chunk: Chunk, header: Buffer, body: memoryview, wait: Callable[[int], object] = lambda _: None
) -> bool:
    """Return whether header and body are, byte for byte, the file of the expected chunk.

    A chunk has exactly one encoding, so its header is encoded again and compared. Nothing in the given header
    is trusted. `decode_header` and `check_body` explain a difference.

    Args:
        chunk: the expected chunk.
        header: header of the file; compared after the whole body has arrived.
        body: body of the file, as long as the chunk's.
        wait: function that blocks until this many bytes of the body have arrived.
    """
    written = _header(chunk, body, wait)
    wait(len(body))
    # A comparison of `bytes` takes a thirtieth of one with a view.
    return written == bytes(header) and all(_is_zero(padding) for _, _, padding in _sections(chunk, body))


def check_body(header: ChunkHeader, body: memoryview) -> None:
    """Check the digest of every unit of a body, and that the padding is zero.

    Raises:
        ChunkError: a check fails; the message names the unit.
    """
    check_size(header.chunk, body)
    for index, (section, content, padding) in enumerate(_sections(header.chunk, body)):
        check_units(header, index, 0, content)
        if not _is_zero(padding):
            raise ChunkError(
                f"bytes after section {section.name} are not zero; expected zeros up to the next section"
            )


def check_size(chunk: Chunk, body: memoryview) -> None:
    """Check that `body` is as long as the chunk's body.

    Raises:
        ChunkError: it has another length.
    """
    if body.nbytes != chunk.body_bytes:
        raise ChunkError(f"a body of {body.nbytes} bytes; expected {chunk.body_bytes}")


def _is_zero(padding: memoryview) -> bool:
    return bytes(padding) == bytes(len(padding))


def _header(chunk: Chunk, body: memoryview, wait: Callable[[int], object]) -> bytes:
    return encode_header(chunk, b"".join(_digests(chunk, body, wait)))


def _digests(chunk: Chunk, body: memoryview, wait: Callable[[int], object]) -> Iterator[bytes]:
    """Yield the digests of all units, piece by piece, as the bytes arrive."""
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
    """Return the (begin, end) pairs of the pieces of a range, each of `size` bytes but the last.

    >>> list(_pieces(10, 25, 10))
    [(10, 20), (20, 25)]
    """
    return ((at, min(at + size, end)) for at in range(begin, end, size))


def _sections(chunk: Chunk, body: memoryview) -> Iterator[tuple[ChunkSection, memoryview, memoryview]]:
    """Yield every section with its bytes and its padding."""
    view = body.cast("B")
    for section, offset in zip(chunk.sections, chunk.offsets, strict=True):
        at = offset - chunk.offsets[0]
        end = at + section.total_bytes
        yield section, view[at:end], view[end : at + aligned(section.total_bytes)]
