"""Functions that decode and verify a chunk file. They trust nothing in it before they have checked it.

`header_span` reads the length of the header from the first bytes, `decode_header` decodes it, `check_units`
compares units with the header's digests, and `verify` checks the whole file. For any content of a file they
raise only `ChunkError`. A length in a file is checked before it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.errors import ChunkError, OtherVersion
from kvferry.tiers.format.checksum import (
    HEADER_DIGEST_BYTES,
    UNIT_DIGEST_BYTES,
    Buffer,
    header_digest,
    unit_digests,
)
from kvferry.tiers.format.chunk import (
    GROUP,
    KEY_BYTES,
    MAGIC,
    MAX_HEADER_BYTES,
    NAME_BYTES,
    PREAMBLE,
    SECTION,
    VERSION,
    Chunk,
    ChunkGroup,
    ChunkSection,
    aligned,
    encode_header,
)

# Number of bytes of a body that are read and checked at a time.
_STEP_BYTES = 8 << 20

# A function that reads a file: it takes an offset and a size, and returns the bytes, fewer at the file's end.
ReadAt = Callable[[int, int], Buffer]


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """The decoded header of a chunk file, whose checksum was verified when it was decoded.

    Attributes:
        chunk: identity and layout of the chunk that the header describes.
        digests: concatenated digests of all units (parts of sections), in the order of the file, 16 bytes
            each.
    """

    chunk: Chunk
    digests: bytes

    def digests_of(self, section: int, first: int, units: int) -> bytes:
        """Return the digests of consecutive units of a section, 16 bytes each, concatenated.

        A unit is a part of a section that has a digest of its own.

        Args:
            section: index of the section in `Chunk.sections`.
            first: index, in the section, of the first unit.
            units: number of units.
        """
        before = sum(one.units for one in self.chunk.sections[:section]) + first
        return self.digests[before * UNIT_DIGEST_BYTES : (before + units) * UNIT_DIGEST_BYTES]


def header_span(start: Buffer) -> int:
    """Read the length of a chunk file's header from the first bytes of the file.

    Args:
        start: first 128 bytes of the file, or more.

    Returns:
        The length of the header in bytes, with padding.

    Raises:
        OtherVersion: the file is a chunk file of another format version.
        ChunkError: the file is not a chunk file, or the length of its header is out of range.
    """
    if len(start) < PREAMBLE.size:
        raise ChunkError(
            f"a file of {len(start)} bytes is not a chunk; expected {PREAMBLE.size} or more for its "
            "header alone"
        )
    magic, version, header_bytes = PREAMBLE.unpack_from(start)[:3]
    if magic != MAGIC:
        raise ChunkError(f"not a chunk file: it begins with {magic.hex()}, expected {MAGIC.hex()}")
    if version != VERSION:
        raise OtherVersion(f"a chunk of format version {version}; this release reads version {VERSION}")
    shortest = PREAMBLE.size + GROUP.size + SECTION.size + UNIT_DIGEST_BYTES + HEADER_DIGEST_BYTES
    if not shortest <= header_bytes <= MAX_HEADER_BYTES:
        raise ChunkError(f"a header of {header_bytes} bytes; expected {shortest} to {MAX_HEADER_BYTES}")
    return aligned(header_bytes)


def decode_header(data: Buffer) -> ChunkHeader:
    """Decode the header of a chunk file.

    Args:
        data: the whole header, whose length `header_span` returns; more bytes may follow.

    Raises:
        ChunkError: the header is damaged, contradicts itself, or is not the canonical encoding of its chunk.
    """
    span = header_span(data)
    if len(data) < span:
        raise ChunkError(f"the header ends after {len(data)} of {span} bytes")
    header = bytes(memoryview(data)[:span])
    _, _, header_bytes, file_bytes, groups, sections, namespace, key_bytes, key, _ = PREAMBLE.unpack_from(
        header
    )
    signed = header_bytes - HEADER_DIGEST_BYTES
    if header_digest(header[:signed]) != header[signed:header_bytes]:
        raise ChunkError("the header is damaged: its checksum differs")
    if key_bytes not in KEY_BYTES:
        raise ChunkError(f"a key of {key_bytes} bytes; expected {KEY_BYTES[0]} to {KEY_BYTES[-1]}")
    tables = PREAMBLE.size + groups * GROUP.size + sections * SECTION.size
    if tables > signed:
        raise ChunkError(
            f"a header of {header_bytes} bytes is too short for {groups} groups and {sections} sections"
        )
    chunk = Chunk(namespace, key[:key_bytes], _groups(header, groups, sections))
    if (chunk.header_bytes, chunk.file_bytes) != (header_bytes, file_bytes):
        raise ChunkError(
            f"header and file have {header_bytes} and {file_bytes} bytes by the preamble; expected "
            f"{chunk.header_bytes} and {chunk.file_bytes} by the sections"
        )
    digests = header[tables:signed]
    if encode_header(chunk, digests) != header:
        raise ChunkError("unused bytes of the header are not zero, or its sections are out of order")
    return ChunkHeader(chunk, digests)


def check_units(header: ChunkHeader, section: int, first: int, data: Buffer) -> None:
    """Check units of a chunk against their digests in the header of the chunk file.

    A unit is a part of a section that has a digest of its own.

    Args:
        header: decoded header of the file.
        section: index of the section in `Chunk.sections`.
        first: index, in the section, of the first unit in `data`.
        data: one or more consecutive whole units.

    Raises:
        ChunkError: a unit is damaged; the message names the first such unit.
    """
    one = header.chunk.sections[section]
    found = unit_digests(data, one.unit_bytes)
    expected = header.digests_of(section, first, len(found) // UNIT_DIGEST_BYTES)
    if found == expected:
        return
    pairs = range(0, len(found), UNIT_DIGEST_BYTES)
    wrong = next(
        at for at in pairs if found[at : at + UNIT_DIGEST_BYTES] != expected[at : at + UNIT_DIGEST_BYTES]
    )
    unit = first + wrong // UNIT_DIGEST_BYTES
    raise ChunkError(f"unit {unit} of section {one.name} is damaged: its checksum differs")


def read_header(read: ReadAt, file_bytes: int) -> ChunkHeader:
    """Read and decode the header of a chunk file, and check that the file has the length in the header.

    Args:
        read: function that takes an offset and a size, and returns these bytes of the file.
        file_bytes: length of the file.

    Raises:
        ChunkError: the file is not a complete chunk file.
    """
    header = decode_header(read(0, header_span(read(0, PREAMBLE.size))))
    check_length(header, file_bytes)
    return header


def verify(read: ReadAt, file_bytes: int) -> ChunkHeader:
    """Check every byte of a chunk file: header, units and padding. Return the decoded header.

    Args:
        read: function that takes an offset and a size, and returns these bytes of the file.
        file_bytes: length of the file.

    Raises:
        ChunkError: a byte is damaged, or the length is wrong.
    """
    header = read_header(read, file_bytes)
    for index, (section, offset) in enumerate(zip(header.chunk.sections, header.chunk.offsets, strict=True)):
        step = max(1, _STEP_BYTES // section.unit_bytes)
        for first in range(0, section.units, step):
            size = min(step, section.units - first) * section.unit_bytes
            data = read(offset + first * section.unit_bytes, size)
            if len(data) != size:
                raise ChunkError(f"section {section.name} ends after {len(data)} of {size} bytes")
            check_units(header, index, first, data)
        end = offset + section.total_bytes
        padding = offset + aligned(section.total_bytes) - end
        if bytes(read(end, padding)) != bytes(padding):
            raise ChunkError(
                f"bytes after section {section.name} are not zero; expected zeros up to the next section"
            )
    return header


def check_length(header: ChunkHeader, file_bytes: int) -> None:
    """Check that the length of a chunk file is the length that its header records.

    Args:
        header: decoded header of the file.
        file_bytes: length of the file.

    Raises:
        ChunkError: the lengths differ.
    """
    if file_bytes != header.chunk.file_bytes:
        raise ChunkError(f"a file of {file_bytes} bytes; expected {header.chunk.file_bytes} by its header")


def _groups(header: bytes, groups: int, sections: int) -> tuple[ChunkGroup, ...]:
    """Decode the group table and the section table of a header, and return the KV cache groups of the chunk.

    The caller must have checked that the tables lie within the header.

    Args:
        header: encoded header.
        groups, sections: number of rows in the group table, and in the section table.

    Raises:
        ChunkError: the tables do not describe valid groups.
    """
    at = PREAMBLE.size + groups * GROUP.size
    rows = SECTION.iter_unpack(header[at : at + sections * SECTION.size])
    found = [
        ChunkSection(_name(size, name), units, unit_bytes) for size, name, _, unit_bytes, units, _ in rows
    ]
    made = []
    for size, name, tokens, count in GROUP.iter_unpack(header[PREAMBLE.size : at]):
        made.append(ChunkGroup(_name(size, name), tokens, tuple(found[:count])))
        del found[:count]
    if found:
        raise ChunkError(f"{len(found)} sections that belong to no group")
    return tuple(made)


def _name(size: int, name: bytes) -> str:
    """Decode a name field of a header: return its first `size` bytes as text.

    Args:
        size: length of the name in bytes.
        name: bytes of the whole field, padded with zeros.

    Raises:
        ChunkError: `size` is out of range.
    """
    if size not in NAME_BYTES:
        raise ChunkError(f"a name of {size} bytes; expected 1 to {NAME_BYTES[-1]}")
    return name[:size].decode("latin-1")
