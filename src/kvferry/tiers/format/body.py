"""The body of a chunk in memory: functions that make its header, and check a body that was read.

The *body* is a chunk file without its header. In memory it has the layout of `geometry.canonical`: *sections*
that begin at page boundaries. A section is a sequence of *units* of one size, such as one KV head of all
layers. The memory has the same bytes as the file, so a body is written and read in one piece. The padding
between sections must be zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvferry.errors import ChunkError
from kvferry.geometry.canonical import CanonicalGroup
from kvferry.tiers.format.checksum import Buffer, digest_of, unit_digests
from kvferry.tiers.format.chunk import Chunk, ChunkGroup, ChunkSection, aligned, encode_header
from kvferry.tiers.format.decode import ChunkHeader, check_units

PIECE_BYTES = 2 << 20
"""Number of bytes of a body that are digested at a time: few enough for the CPU cache, and few calls."""


def chunk_group(group: CanonicalGroup, tokens: int) -> ChunkGroup:
    """Describe the content of a chunk for the header of its file: KV cache group, tokens and sections.

    Args:
        group: KV cache group that the chunk belongs to, in the format in which chunks are stored.
        tokens: number of tokens in the chunk; 0 for a snapshot of recurrent state.
    """
    sections = (
        ChunkSection(f"{one.axis or 'all'}.{one.total}", one.units, one.unit_bytes) for one in group.sections
    )
    return ChunkGroup(group.label, tokens, tuple(sections))


def zero_padding(chunk: Chunk, body: memoryview) -> None:
    """Write zeros into the padding after each section of a chunk's body (its file without the header).

    Args:
        chunk: identity and layout of the chunk.
        body: writable memory with the sections, each at a multiple of 4096 bytes. The padding is overwritten.

    Raises:
        ChunkError: `body` does not have the length of the chunk's body.
    """
    check_size(chunk, body)
    for _, _, padding in _sections(chunk, body):
        padding[:] = bytes(len(padding))


def make_header(chunk: Chunk, body: memoryview) -> bytes:
    """Return the header of a chunk file, with the digests of all units of its body.

    A unit is a part of a section with a digest of its own. The padding of `body` does not affect the header,
    but it must be zero when the file is written (see `zero_padding`).

    Args:
        chunk: identity and layout of the chunk.
        body: content of the file after the header.

    Raises:
        ChunkError: `body` does not have the length of the chunk's body.
    """
    check_size(chunk, body)
    return _header(chunk, body, lambda _: None)


def is_chunk(
    chunk: Chunk, header: Buffer, body: memoryview, wait: Callable[[int], object] = lambda _: None
) -> bool:
    """Return whether a header and a body are, byte for byte, the file of the expected chunk.

    A chunk has exactly one encoding. So this function computes the expected header from the body, compares it
    with the given header, and trusts no content of the given header. If they differ, `decode_header` and
    `check_body` find the reason.

    Args:
        chunk: identity and layout of the expected chunk.
        header: header of the file. It is read only after the whole body has arrived.
        body: body of the file, as long as the expected chunk's body.
        wait: function that takes a number of bytes, and blocks until that many bytes of the body have
            arrived.
    """
    written = _header(chunk, body, wait)
    wait(len(body))
    # A comparison of `bytes` takes a thirtieth of one with a view.
    return written == bytes(header) and all(_is_zero(padding) for _, _, padding in _sections(chunk, body))


def check_body(header: ChunkHeader, body: memoryview) -> None:
    """Check the digest of every unit in a chunk's body, and check that the padding is zero.

    Args:
        header: decoded header of the chunk's file, with the expected digests.
        body: content of the file after the header.

    Raises:
        ChunkError: a check fails; the message names the section, and the unit if its digest differs.
    """
    check_size(header.chunk, body)
    for index, (section, content, padding) in enumerate(_sections(header.chunk, body)):
        check_units(header, index, 0, content)
        if not _is_zero(padding):
            raise ChunkError(
                f"bytes after section {section.name} are not zero; expected zeros up to the next section"
            )


def check_size(chunk: Chunk, body: memoryview) -> None:
    """Check that `body` has the length of the chunk's body (the chunk file without its header).

    Raises:
        ChunkError: the lengths differ.
    """
    if body.nbytes != chunk.body_bytes:
        raise ChunkError(f"a body of {body.nbytes} bytes; expected {chunk.body_bytes}")


def _is_zero(padding: memoryview) -> bool:
    return bytes(padding) == bytes(len(padding))


def _header(chunk: Chunk, body: memoryview, wait: Callable[[int], object]) -> bytes:
    """Compute the header of a chunk from its body, while the bytes of the body arrive.

    Args:
        chunk: identity and layout of the chunk.
        body: memory that the content of the chunk arrives in.
        wait: function that takes a number of bytes, and blocks until that many bytes of the body have
            arrived.
    """
    return encode_header(chunk, b"".join(_digests(chunk, body, wait)))


def _digests(chunk: Chunk, body: memoryview, wait: Callable[[int], object]) -> Iterator[bytes]:
    """Yield the digests of all units of a chunk in order, while the bytes arrive.

    Args:
        chunk: identity and layout of the chunk.
        body: memory that the content of the chunk arrives in.
        wait: function that takes a number of bytes, and blocks until that many bytes of the body have
            arrived.

    Yields:
        Concatenated digests of one or several units, 16 bytes each.
    """
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
    """Yield the pieces of a range of bytes, each piece after its bytes have arrived.

    Args:
        view: memory that the bytes arrive in.
        begin, end: half-open range of bytes in `view`.
        wait: function that takes a number of bytes, and blocks until that many bytes of `view` have arrived.
    """
    for at, stop in _pieces(begin, end, PIECE_BYTES):
        wait(stop)
        yield view[at:stop]


def _pieces(begin: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the (begin, end) pairs of pieces of `size` bytes that together cover a range of bytes.

    The last piece is shorter if the length of the range is not a multiple of `size`.

    >>> list(_pieces(10, 25, 10))
    [(10, 20), (20, 25)]
    """
    return ((at, min(at + size, end)) for at in range(begin, end, size))


def _sections(chunk: Chunk, body: memoryview) -> Iterator[tuple[ChunkSection, memoryview, memoryview]]:
    """Yield each section of a chunk with views of its bytes and of the padding after it.

    Args:
        chunk: identity and layout of the chunk.
        body: content of the chunk's file after the header.

    Yields:
        (section, view of the section's bytes, view of the padding). Both views are parts of `body`.
    """
    view = body.cast("B")
    for section, offset in zip(chunk.sections, chunk.offsets, strict=True):
        at = offset - chunk.offsets[0]
        end = at + section.total_bytes
        yield section, view[at:end], view[end : at + aligned(section.total_bytes)]
