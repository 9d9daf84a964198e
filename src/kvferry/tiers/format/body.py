"""The body of a chunk in memory: make its header, and check a body that was read.

The *body* is a chunk file without its header. In memory it has the layout of `geometry.canonical`: *sections*
that begin at page boundaries, each a sequence of *units* of one size. The memory has the same bytes as the
file, so a body is written and read in one piece. The padding between sections must be zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvferry.errors import ChunkError
from kvferry.geometry.canonical import CanonicalGroup
from kvferry.tiers.format.checksum import Buffer, digest_of, unit_digests
from kvferry.tiers.format.chunk import Chunk, ChunkGroup, ChunkSection, aligned, encode_header
from kvferry.tiers.format.decode import ChunkHeader, check_units

# Bytes of a body that are digested at a time: few enough for the CPU cache, and few calls.
PIECE_BYTES = 2 << 20

# Blocks until that many bytes of a body have arrived.
Wait = Callable[[int], object]


def chunk_group(group: CanonicalGroup, tokens: int) -> ChunkGroup:
    """Describe the content of a chunk for the header of its file.

    Args:
        tokens: number of tokens in the chunk; 0 for a snapshot of recurrent state.
    """
    sections = (
        ChunkSection(f"{one.axis or 'all'}.{one.total}", one.units, one.unit_bytes) for one in group.sections
    )
    return ChunkGroup(group.label, tokens, tuple(sections))


def zero_padding(chunk: Chunk, body: memoryview) -> None:
    """Write zeros into the padding after each section of a body."""
    check_size(chunk, body)
    for _, _, padding in _sections(chunk, body):
        padding[:] = bytes(len(padding))


def make_header(chunk: Chunk, body: memoryview) -> bytes:
    """Return the header of a chunk file, with the digests of all units of its body.

    The padding of `body` does not affect the header, but must be zero when the file is written.
    """
    check_size(chunk, body)
    return encode_header(chunk, b"".join(_digests(chunk, body, lambda _: None)))


def is_chunk(chunk: Chunk, header: Buffer, body: memoryview, wait: Wait = lambda _: None) -> bool:
    """Return whether a header and a body are, byte for byte, the file of the expected chunk.

    Args:
        header: read only after the whole body has arrived.
        body: as long as the expected chunk's body.
        wait: block until that many bytes of the body have arrived.
    """
    # A chunk has exactly one encoding. So the expected header is computed from the body and compared, and no
    # content of the given header is trusted.
    written = encode_header(chunk, b"".join(_digests(chunk, body, wait)))
    wait(len(body))
    # A comparison of `bytes` takes a thirtieth of one with a view.
    return written == bytes(header) and all(_is_zero(padding) for _, _, padding in _sections(chunk, body))


def check_body(header: ChunkHeader, body: memoryview) -> None:
    """Check the digest of every unit in a body, and that the padding is zero."""
    check_size(header.chunk, body)
    for index, (section, content, padding) in enumerate(_sections(header.chunk, body)):
        check_units(header, index, 0, content)
        if not _is_zero(padding):
            raise ChunkError(
                f"bytes after section {section.name} are not zero; expected zeros up to the next section"
            )


def check_size(chunk: Chunk, body: memoryview) -> None:
    """Check that `body` has the length of the chunk's body."""
    if body.nbytes != chunk.body_bytes:
        raise ChunkError(f"a body of {body.nbytes} bytes; expected {chunk.body_bytes}")


def _is_zero(padding: memoryview) -> bool:
    return bytes(padding) == bytes(len(padding))


def _digests(chunk: Chunk, body: memoryview, wait: Wait) -> Iterator[bytes]:
    """Yield the digests of one or several units at a time, concatenated, while their bytes arrive."""
    view = body.cast("B")
    for section, offset in zip(chunk.sections, chunk.offsets, strict=True):
        begin, unit_bytes = offset - chunk.offsets[0], section.unit_bytes
        end = begin + section.total_bytes
        if unit_bytes < PIECE_BYTES:
            for at, stop in _pieces(begin, end, PIECE_BYTES // unit_bytes * unit_bytes):
                wait(stop)
                yield unit_digests(view[at:stop], unit_bytes)
            continue
        # Units of more than a piece are digested in pieces, or they would leave the CPU cache before.
        for first in range(begin, end, unit_bytes):
            yield digest_of(_arriving(view, first, first + unit_bytes, wait))


def _arriving(view: memoryview, begin: int, end: int, wait: Wait) -> Iterator[memoryview]:
    for at, stop in _pieces(begin, end, PIECE_BYTES):
        wait(stop)
        yield view[at:stop]


def _pieces(begin: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the (begin, end) pairs of pieces of `size` bytes; the last may be shorter.

    >>> list(_pieces(10, 25, 10))
    [(10, 20), (20, 25)]
    """
    return ((at, min(at + size, end)) for at in range(begin, end, size))


def _sections(chunk: Chunk, body: memoryview) -> Iterator[tuple[ChunkSection, memoryview, memoryview]]:
    """Yield each section of a chunk with views of its bytes and of the padding after it."""
    view = body.cast("B")
    for section, offset in zip(chunk.sections, chunk.offsets, strict=True):
        at = offset - chunk.offsets[0]
        end = at + section.total_bytes
        yield section, view[at:end], view[end : at + aligned(section.total_bytes)]
