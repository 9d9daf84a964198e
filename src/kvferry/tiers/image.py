"""A chunk in memory as a chunk file: the header before it, and the check of what was read.

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
    _check_length(chunk, body)
    digests = []
    for section, content, padding in _sections(chunk, body):
        padding[:] = bytes(len(padding))
        digests.append(unit_digests(content, section.unit_bytes))
    return encode_header(chunk, b"".join(digests))


def check_body(header: Header, body: memoryview) -> None:
    """See that a body is what was written, unit by unit, and nothing between its sections.

    Raises:
        ChunkError: it is not; says which unit.
    """
    _check_length(header.chunk, body)
    for index, (section, content, padding) in enumerate(_sections(header.chunk, body)):
        check_units(header, index, 0, content)
        if any(padding):
            raise ChunkError(f"bytes between sections after {section.name} that are not zero")


def _check_length(chunk: Chunk, body: memoryview) -> None:
    expected = chunk.file_bytes - chunk.offsets[0]
    if body.nbytes != expected:
        raise ChunkError(f"a body of {body.nbytes} bytes; the chunk's has {expected}")


def _sections(chunk: Chunk, body: Buffer) -> Iterator[tuple[Section, memoryview, memoryview]]:
    """Every section with its bytes, and those that pad it."""
    view = memoryview(body).cast("B")
    for section, offset in zip(chunk.sections, chunk.offsets, strict=True):
        at = offset - chunk.offsets[0]
        end = at + section.total_bytes
        yield section, view[at:end], view[end : at + aligned(section.total_bytes)]
