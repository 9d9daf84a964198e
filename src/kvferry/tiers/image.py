"""A chunk in memory as a chunk file: the header before it, and whether what was read is one.

In memory a chunk is what `geometry.canonical` says: sections, each from a page on. That is the body of its
file, byte for byte, so it is written and read in one piece; only what pads its sections must be zero.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.errors import ChunkError
from kvferry.geometry.canonical import CanonicalGroup
from kvferry.tiers.checksum import Buffer, unit_digests
from kvferry.tiers.decode import Header, check_units
from kvferry.tiers.format import Chunk, Group, Section, aligned, encode_header


def group_of(group: CanonicalGroup, tokens: int) -> Group:
    """A canonical group as the group of a chunk file.

    Args:
        group: what the chunk holds.
        tokens: of it; 0 of a snapshot.
    """
    sections = (
        Section(f"{one.axis or 'all'}.{one.total}", one.units, one.unit_bytes) for one in group.sections
    )
    return Group(group.label, tokens, tuple(sections))


def header_of(chunk: Chunk, body: memoryview) -> bytes:
    """The header of a file, with the digests of its body; also pads the body's sections with zeros.

    Args:
        chunk: what the file is.
        body: its sections, each from a page on; what lies between them is written.

    Raises:
        ChunkError: the body has another length than the chunk's.
    """
    check_size(chunk, body)
    for _, _, padding in _sections(chunk, body):
        padding[:] = bytes(len(padding))
    return _header(chunk, body)


def is_image(chunk: Chunk, header: Buffer, body: memoryview) -> bool:
    """Whether header and body are, byte by byte, a file of this very chunk.

    A chunk has exactly one image, so its header is written anew and compared: nothing that the given one says
    is used for anything. Why they are none, `decode_header` and `check_body` say.

    Args:
        chunk: what the file should be.
        header: of the file.
        body: of the file, as long as the chunk's.
    """
    padded = all(_is_zero(padding) for _, _, padding in _sections(chunk, body))
    return padded and _header(chunk, body) == header


def check_body(header: Header, body: memoryview) -> None:
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


def _header(chunk: Chunk, body: memoryview) -> bytes:
    digests = (unit_digests(content, one.unit_bytes) for one, content, _ in _sections(chunk, body))
    return encode_header(chunk, b"".join(digests))


def _sections(chunk: Chunk, body: memoryview) -> Iterator[tuple[Section, memoryview, memoryview]]:
    """Every section with its bytes, and those that pad it."""
    view = body.cast("B")
    for section, offset in zip(chunk.sections, chunk.offsets, strict=True):
        at = offset - chunk.offsets[0]
        end = at + section.total_bytes
        yield section, view[at:end], view[end : at + aligned(section.total_bytes)]
