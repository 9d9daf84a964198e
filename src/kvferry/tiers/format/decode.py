"""Make the header of a chunk file, decode it, and verify files. Nothing in a file is trusted unchecked.

For any content of a file, the functions raise only `ChunkError`; `OtherVersion`, which is one, for another
version of the format. A length in a file is checked before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from xxhash import xxh3_128

from kvferry.common.errors import ChunkError, OtherKey, OtherVersion
from kvferry.geometry.canonical import CanonicalGroup, FormSection
from kvferry.tiers.format.chunk import (
    ENCRYPTED_VERSION,
    GROUP,
    HEADER_DIGEST_BYTES,
    KEY_BYTES,
    MAGIC,
    MAX_HEADER_BYTES,
    NAME_BYTES,
    PREAMBLE,
    SECTION,
    SEGMENT_BYTES,
    UNIT_DIGEST_BYTES,
    VERSION,
    Buffer,
    Chunk,
    ChunkGroup,
    ChunkSection,
    aligned,
    encode_header,
    header_digest,
    unit_digests,
)
from kvferry.tiers.format.encryption import EncryptionRecord

# Bytes of a body that `verify` reads and checks at a time.
_STEP_BYTES = 8 << 20
# Bytes of a body that are digested at a time: few enough for the CPU cache, and few calls.
PIECE_BYTES = 2 << 20

# A function that reads a file: it takes an offset and a size, and returns the bytes, fewer at the file's end.
ReadAt = Callable[[int, int], Buffer]
# A function that blocks until that many bytes of a body have arrived.
Wait = Callable[[int], object]


def chunk_group(group: CanonicalGroup, tokens: int) -> ChunkGroup:
    """Describe the content of a chunk for the header of its file; `tokens` are 0 for a snapshot."""
    sections = (ChunkSection(_section_name(one), one.units, one.unit_bytes) for one in group.sections)
    return ChunkGroup(group.label, tokens, tuple(sections))


def _section_name(section: FormSection) -> str:
    each = f".{section.element_tokens}" if section.element_tokens > 1 else ""
    return f"{section.axis or 'all'}.{section.total}{each}"


def make_header(chunk: Chunk, body: memoryview) -> bytes:
    """Zero the padding after each section of a body, and return the header of its file."""
    zero_padding(chunk, body)
    return encode_header(chunk, b"".join(_digests(chunk, body, lambda _: None)))


def zero_padding(chunk: Chunk, body: memoryview) -> None:
    """Set the padding after each section of a body to zero. Raise ChunkError if the body's length differs."""
    check_size(chunk, body)
    for _, _, padding in _sections(chunk, body):
        padding[:] = bytes(len(padding))


def content_digest(namespace: bytes, key: bytes, group: ChunkGroup, body: memoryview) -> bytes:
    """Return a digest of a chunk, 32 bytes: of its identity and the bytes of its units, without padding.

    It is the digest at the end of the header of the chunk's file, if the file named 0 tokens: their number
    follows from the key.
    """
    chunk = Chunk(namespace, key, (replace(group, tokens=0),))
    check_size(chunk, body)
    header = encode_header(chunk, b"".join(_digests(chunk, body, lambda _: None)))
    return header[chunk.header_bytes - HEADER_DIGEST_BYTES : chunk.header_bytes]


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


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """The decoded header of a chunk file, whose checksum was verified."""

    chunk: Chunk
    digests: bytes  # digests of all units, or of all encrypted segments, in the file's order, 16 bytes each
    encryption: EncryptionRecord | None = None  # None if the chunk is not encrypted


def header_span(start: Buffer) -> int:
    """Read the length of a header, with padding, from the first 128 bytes of the file or more."""
    if len(start) < PREAMBLE.size:
        raise ChunkError(
            f"a file of {len(start)} bytes is not a chunk; expected {PREAMBLE.size} or more for its "
            "header alone"
        )
    magic, version, header_bytes = PREAMBLE.unpack_from(start)[:3]
    if magic != MAGIC:
        raise ChunkError(f"not a chunk file: it begins with {magic.hex()}, expected {MAGIC.hex()}")
    if version not in (VERSION, ENCRYPTED_VERSION):
        raise OtherVersion(
            f"a chunk of format version {version}; this release reads versions {VERSION} and "
            f"{ENCRYPTED_VERSION}"
        )
    shortest = PREAMBLE.size + GROUP.size + SECTION.size + UNIT_DIGEST_BYTES + HEADER_DIGEST_BYTES
    if not shortest <= header_bytes <= MAX_HEADER_BYTES:
        raise ChunkError(f"a header of {header_bytes} bytes; expected {shortest} to {MAX_HEADER_BYTES}")
    return aligned(header_bytes)


def decode_header(data: Buffer) -> ChunkHeader:
    """Decode the header of a chunk file. `data` begins with the whole header (`header_span`)."""
    span = header_span(data)
    if len(data) < span:
        raise ChunkError(f"the header ends after {len(data)} of {span} bytes")
    header = bytes(memoryview(data)[:span])
    _, version, header_bytes, file_bytes, groups, sections, namespace, key_bytes, key, _ = (
        PREAMBLE.unpack_from(header)
    )
    signed = header_bytes - HEADER_DIGEST_BYTES
    if header_digest(header[:signed]) != header[signed:header_bytes]:
        raise ChunkError("the header is damaged: its checksum differs")
    if key_bytes not in KEY_BYTES:
        raise ChunkError(f"a key of {key_bytes} bytes; expected {KEY_BYTES[0]} to {KEY_BYTES[-1]}")
    tables = PREAMBLE.size + groups * GROUP.size + sections * SECTION.size
    # Before the tables are read: the digest says that they are unchanged, not that a sane writer made them.
    if tables > signed:
        raise ChunkError(
            f"a header of {header_bytes} bytes is too short for {groups} groups and {sections} sections"
        )
    chunk = Chunk(namespace, key[:key_bytes], _groups(header, groups, sections), version == ENCRYPTED_VERSION)
    if (chunk.header_bytes, chunk.file_bytes) != (header_bytes, file_bytes):
        raise ChunkError(
            f"header and file have {header_bytes} and {file_bytes} bytes by the preamble; expected "
            f"{chunk.header_bytes} and {chunk.file_bytes} by the sections"
        )
    checks = header[tables:signed]
    # One encoding only, so that equal chunks have equal bytes.
    if encode_header(chunk, checks) != header:
        raise ChunkError("unused bytes of the header are not zero, or its sections are out of order")
    if not chunk.encrypted:
        return ChunkHeader(chunk, checks)
    encryption = EncryptionRecord.decode(checks)
    return ChunkHeader(chunk, encryption.digests, encryption)


def _groups(header: bytes, groups: int, sections: int) -> tuple[ChunkGroup, ...]:
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
    if size not in NAME_BYTES:
        raise ChunkError(f"a name of {size} bytes; expected 1 to {NAME_BYTES[-1]}")
    # Latin-1 decodes any bytes. `ChunkSection` and `ChunkGroup` refuse all but ASCII.
    return name[:size].decode("latin-1")


def read_header(read: ReadAt, file_bytes: int) -> ChunkHeader:
    """Read and decode the header of a chunk file of `file_bytes` bytes."""
    header = decode_header(read(0, header_span(read(0, PREAMBLE.size))))
    if file_bytes != header.chunk.file_bytes:
        raise ChunkError(f"a file of {file_bytes} bytes; expected {header.chunk.file_bytes} by its header")
    return header


def is_expected(header: ChunkHeader, chunk: Chunk) -> bool:
    """Return whether a file has the expected groups, tokens and sections.

    Raise ChunkError if it is another chunk, and OtherKey if it is encrypted and the expected one is not.
    """
    found = header.chunk
    if (found.namespace, found.key) != (chunk.namespace, chunk.key):
        raise ChunkError(f"it holds the chunk of key {found.key.hex()}, expected {chunk.key.hex()}")
    if header.encryption is not None and not chunk.encrypted:
        raise OtherKey(f"it is encrypted with key {header.encryption.key_id!r}, and no key_file is set")
    return found.groups == chunk.groups


def verify(read: ReadAt, file_bytes: int) -> ChunkHeader:
    """Check every byte of a chunk file: header, units and padding. Return the decoded header.

    No key is needed: the digests of an encrypted file are those of its encrypted bytes.
    """
    header = read_header(read, file_bytes)
    if header.encryption is not None:
        chunk = header.chunk
        for at in range(0, chunk.body_bytes, _STEP_BYTES):
            size = min(_STEP_BYTES, chunk.body_bytes - at)
            if len(data := read(chunk.offsets[0] + at, size)) != size:
                raise ChunkError(f"the body ends after {at + len(data)} of {chunk.body_bytes} bytes")
            _check_segments(header, at // SEGMENT_BYTES, data)
        return header
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


def check_units(header: ChunkHeader, section: int, first: int, data: Buffer) -> None:
    """Check `data`, units of a section from index `first` on. The error names the first damaged unit."""
    one = header.chunk.sections[section]
    found = unit_digests(data, one.unit_bytes)
    before = UNIT_DIGEST_BYTES * (sum(one.units for one in header.chunk.sections[:section]) + first)
    expected = header.digests[before : before + len(found)]
    if found == expected:
        return
    pairs = range(0, len(found), UNIT_DIGEST_BYTES)
    wrong = next(
        at for at in pairs if found[at : at + UNIT_DIGEST_BYTES] != expected[at : at + UNIT_DIGEST_BYTES]
    )
    unit = first + wrong // UNIT_DIGEST_BYTES
    raise ChunkError(f"unit {unit} of section {one.name} is damaged: its checksum differs")


def _check_segments(header: ChunkHeader, first: int, data: Buffer) -> None:
    """Check encrypted segments from index `first` on. The error names the first damaged one."""
    found = unit_digests(data, SEGMENT_BYTES)
    for index, at in enumerate(range(0, len(found), UNIT_DIGEST_BYTES), first):
        expected = header.digests[index * UNIT_DIGEST_BYTES : (index + 1) * UNIT_DIGEST_BYTES]
        if found[at : at + UNIT_DIGEST_BYTES] != expected:
            raise ChunkError(f"encrypted segment {index} is damaged: its checksum differs")


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
            step = PIECE_BYTES // unit_bytes * unit_bytes
            for at in range(begin, end, step):
                stop = min(at + step, end)
                wait(stop)
                yield unit_digests(view[at:stop], unit_bytes)
            continue
        # Units of more than a piece are digested in pieces, or they would leave the CPU cache before.
        for first in range(begin, end, unit_bytes):
            digest = xxh3_128()
            for at in range(first, first + unit_bytes, PIECE_BYTES):
                stop = min(at + PIECE_BYTES, first + unit_bytes)
                wait(stop)
                digest.update(view[at:stop])
            yield digest.digest()


def _sections(chunk: Chunk, body: memoryview) -> Iterator[tuple[ChunkSection, memoryview, memoryview]]:
    """Yield each section of a chunk with views of its bytes and of the padding after it."""
    view = body.cast("B")
    for section, offset in zip(chunk.sections, chunk.offsets, strict=True):
        at = offset - chunk.offsets[0]
        end = at + section.total_bytes
        yield section, view[at:end], view[end : at + aligned(section.total_bytes)]
