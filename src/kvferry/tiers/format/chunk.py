"""The parts of a chunk file, their offsets, and the encoding of its header.

A file contains one chunk: a header with the chunk's identity and a digest of every unit, then the *sections*,
each at a multiple of 4096 bytes. A section has `units` units of `unit_bytes` each. A *unit* is the smallest
piece that a tensor-parallel rank may need alone, so each rank needs consecutive units. `docs/format.md`
specifies every byte. A chunk has exactly one encoding: equal chunks have equal bytes.

>>> group = ChunkGroup("full", tokens=256, sections=(ChunkSection("kv", units=8, unit_bytes=1 << 20),))
>>> chunk = Chunk(bytes(32), bytes(range(16)), (group,))
>>> chunk.header_bytes, chunk.offsets, chunk.file_bytes
(384, (4096,), 8392704)
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any

from blake3 import blake3
from xxhash import xxh3_128_digest

from kvferry.common.errors import ChunkError

MAGIC = b"KVFCHUNK"
VERSION = 2
# Version of a chunk whose body is encrypted.
ENCRYPTED_VERSION = 3
ALIGNMENT = 4096
NAMESPACE_BYTES = 32
KEY_BYTES = range(16, 33)
NAME_BYTES = range(1, 32)
UNIT_DIGEST_BYTES = 16
HEADER_DIGEST_BYTES = 32
# Bytes of a body that are encrypted, and then verified, at a time. A multiple of the alignment.
SEGMENT_BYTES = 1 << 20
TAG_BYTES = 16
# A header is read as a whole before its digest is checked. This limits the cost of a damaged length.
MAX_HEADER_BYTES = 16 << 20

PREAMBLE = struct.Struct("<8s II Q II 32s B32s 31s")
GROUP = struct.Struct("<B31s II")
SECTION = struct.Struct("<B31s QQ II")
# The key and the salt of an encrypted chunk.
ENCRYPTION = struct.Struct("<B31s 32s")

_U32 = (1 << 32) - 1
_U64 = (1 << 64) - 1

# Units and bytes that are digested without a pause.
_STRETCH_UNITS, _STRETCH_BYTES = 512, 1 << 20
_PAUSE_SECONDS = 20e-6
# Size from which python-xxhash releases the interpreter's lock (`XXHASH_GIL_MINSIZE`).
_LETS_OTHERS_RUN_BYTES = 100 << 10

# Types that hold bytes. Pass an array as `memoryview(array).cast("B")`, which refuses non-contiguous arrays.
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class ChunkSection:
    """A section of a chunk: units of equal size, in the order of the tensor axis that ranks split."""

    name: str  # unique in its group: 1 to 31 printable ASCII characters
    units: int  # number of units, at least 1
    unit_bytes: int  # bytes of one unit, at least 1

    def __post_init__(self) -> None:
        _check_name("section", self.name)
        if not (1 <= self.units <= _U32 and 1 <= self.unit_bytes <= _U64):
            raise ChunkError(
                f"section {self.name} has {self.units} units of {self.unit_bytes} bytes; expected 1 or more"
            )

    @property
    def total_bytes(self) -> int:
        return self.units * self.unit_bytes


@dataclass(frozen=True, slots=True)
class ChunkGroup:
    """The part of a chunk that belongs to one KV cache group."""

    name: str  # unique in the chunk: 1 to 31 printable ASCII characters
    tokens: int  # number of tokens that the sections hold; 0 for a snapshot of recurrent state
    sections: tuple[ChunkSection, ...]  # one or more, with different names

    def __post_init__(self) -> None:
        _check_name("group", self.name)
        if not 0 <= self.tokens <= _U32:
            raise ChunkError(f"group {self.name} holds {self.tokens} tokens; expected 0 to {_U32}")
        _check_different(f"group {self.name}", "section", [section.name for section in self.sections])


@dataclass(frozen=True)
class Chunk:
    """The identity of a chunk, and the layout of its file in bytes, which is derived from the groups."""

    namespace: bytes  # digest of the namespace, 32 bytes
    key: bytes  # digest that identifies the content within the namespace, 16 to 32 bytes
    groups: tuple[ChunkGroup, ...]  # one or more, with different names
    encrypted: bool = False  # whether the file is encrypted, and has a tag of every segment in its header

    sections: tuple[ChunkSection, ...] = field(init=False, repr=False, compare=False)  # in the file's order
    tables: bytes = field(init=False, repr=False, compare=False)  # encoded group table and section table
    header_bytes: int = field(init=False, repr=False, compare=False)  # with its digest, without padding
    offsets: tuple[int, ...] = field(init=False, repr=False, compare=False)  # of each section in the file
    file_bytes: int = field(init=False, repr=False, compare=False)
    body_bytes: int = field(init=False, repr=False, compare=False)  # the file without its padded header

    def __post_init__(self) -> None:
        if len(self.namespace) != NAMESPACE_BYTES:
            raise ChunkError(f"a namespace of {len(self.namespace)} bytes; expected {NAMESPACE_BYTES}")
        if len(self.key) not in KEY_BYTES:
            raise ChunkError(f"a key of {len(self.key)} bytes; expected {KEY_BYTES[0]} to {KEY_BYTES[-1]}")
        vars(self).update(_layout(self.groups, self.encrypted))


# A model has few groups, and this is called for each chunk.
@lru_cache(maxsize=16)
def _layout(groups: tuple[ChunkGroup, ...], encrypted: bool) -> dict[str, Any]:
    _check_different("chunk", "group", [group.name for group in groups])
    sections = tuple(section for group in groups for section in group.sections)
    sizes = [aligned(section.total_bytes) for section in sections]
    if encrypted:
        segments = -(-sum(sizes) // SEGMENT_BYTES)
        checks = ENCRYPTION.size + segments * (UNIT_DIGEST_BYTES + TAG_BYTES) + TAG_BYTES
    else:
        checks = UNIT_DIGEST_BYTES * sum(section.units for section in sections)
    tables = GROUP.size * len(groups) + SECTION.size * len(sections)
    header_bytes = PREAMBLE.size + tables + checks + HEADER_DIGEST_BYTES
    if header_bytes > MAX_HEADER_BYTES:
        raise ChunkError(f"a header of {header_bytes} bytes; at most {MAX_HEADER_BYTES}: use larger units")
    *offsets, file_bytes = accumulate(sizes, initial=aligned(header_bytes))
    if file_bytes > _U64:
        raise ChunkError(f"a chunk of {file_bytes} bytes; at most {_U64}")
    rows = [GROUP.pack(*_name(group.name), group.tokens, len(group.sections)) for group in groups]
    for section, offset in zip(sections, offsets, strict=True):
        rows.append(SECTION.pack(*_name(section.name), offset, section.unit_bytes, section.units, 0))
    return {
        "sections": sections,
        "tables": b"".join(rows),
        "header_bytes": header_bytes,
        "offsets": tuple(offsets),
        "file_bytes": file_bytes,
        "body_bytes": file_bytes - offsets[0],
    }


def aligned(size: int) -> int:
    """Round a number of bytes up to a multiple of 4096."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def encode_header(chunk: Chunk, checks: bytes) -> bytes:
    """Return the header of a chunk file, padded with zeros to the start of the first section.

    `checks` are the digests of all units, in the order of the file, 16 bytes each; in an encrypted file all
    that `encryption.EncryptionRecord` encodes.
    """
    header = header_start(chunk) + checks
    return (header + header_digest(header)).ljust(chunk.offsets[0], b"\0")


def header_start(chunk: Chunk) -> bytes:
    """Return the preamble and the tables of a chunk file."""
    version = ENCRYPTED_VERSION if chunk.encrypted else VERSION
    preamble = PREAMBLE.pack(
        *(MAGIC, version, chunk.header_bytes, chunk.file_bytes, len(chunk.groups), len(chunk.sections)),
        *(chunk.namespace, len(chunk.key), chunk.key, b""),
    )
    return preamble + chunk.tables


def header_digest(data: Buffer) -> bytes:
    """Return the BLAKE3 digest of a header, 32 bytes. `data` is the header up to its digest."""
    return blake3(data).digest(HEADER_DIGEST_BYTES)


def unit_digests(data: Buffer, unit_bytes: int, sleep: Callable[[float], None] = time.sleep) -> bytes:
    """Return the XXH3 digests of units without gaps between them, 16 bytes each, concatenated."""
    # XXH3 is several times as fast as BLAKE3, and units are most of a file. It detects accidental damage
    # only: whoever can write to the storage can forge both.
    view, digests = memoryview(data), list[bytes]()
    stretch = min(_STRETCH_UNITS * unit_bytes, max(_STRETCH_BYTES // unit_bytes, 1) * unit_bytes)
    for begin in range(0, len(view), stretch):
        if begin and unit_bytes < _LETS_OTHERS_RUN_BYTES:
            # Without a pause, the engine's thread would wait for Python's switch interval, 5 ms.
            sleep(_PAUSE_SECONDS)
        end = min(begin + stretch, len(view))
        digests += [xxh3_128_digest(view[at : at + unit_bytes]) for at in range(begin, end, unit_bytes)]
    return b"".join(digests)


def _name(name: str) -> tuple[int, bytes]:
    return len(name), name.encode("ascii")


def _check_name(what: str, name: str) -> None:
    if len(name) not in NAME_BYTES or not (name.isascii() and name.isprintable()):
        raise ChunkError(
            f"a {what} named {name!r}; expected 1 to {NAME_BYTES[-1]} printable ASCII characters"
        )


def _check_different(whole: str, what: str, names: Sequence[str]) -> None:
    if not names:
        raise ChunkError(f"a {whole} without a {what}; expected at least one")
    if len(set(names)) < len(names):
        raise ChunkError(f"the {what}s of a {whole} are named {', '.join(names)}; expected different names")
