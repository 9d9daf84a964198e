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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate

from blake3 import blake3
from xxhash import xxh3_128, xxh3_128_digest

from kvferry.common.errors import ChunkError

UNIT_DIGEST_BYTES = 16
HEADER_DIGEST_BYTES = 32

_STRETCH_UNITS, _STRETCH_BYTES = 512, 1 << 20
_PAUSE_SECONDS = 20e-6
# Size from which python-xxhash releases the interpreter's lock (`XXHASH_GIL_MINSIZE`).
_LETS_OTHERS_RUN_BYTES = 100 << 10

# Types that hold bytes. Pass an array as `memoryview(array).cast("B")`, which refuses non-contiguous arrays.
Buffer = bytes | bytearray | memoryview


def unit_digests(data: Buffer, unit_bytes: int, sleep: Callable[[float], None] = time.sleep) -> bytes:
    """Return the XXH3 digests of units, 16 bytes each, concatenated.

    Args:
        data: units without gaps between them.
        unit_bytes: bytes of one unit, at least 1.
    """
    view, digests = memoryview(data), list[bytes]()
    stretch = min(_STRETCH_UNITS * unit_bytes, max(_STRETCH_BYTES // unit_bytes, 1) * unit_bytes)
    for begin in range(0, len(view), stretch):
        if begin and unit_bytes < _LETS_OTHERS_RUN_BYTES:
            # Without a pause, the engine's thread would wait for Python's switch interval, 5 ms.
            sleep(_PAUSE_SECONDS)
        end = min(begin + stretch, len(view))
        digests += [xxh3_128_digest(view[at : at + unit_bytes]) for at in range(begin, end, unit_bytes)]
    return b"".join(digests)


def digest_of(pieces: Iterable[Buffer]) -> bytes:
    """Return the XXH3 digest of one unit, 16 bytes. Each piece is digested before the next is requested."""
    digest = xxh3_128()
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def header_digest(data: Buffer) -> bytes:
    """Return the BLAKE3 digest of a header, 32 bytes. `data` is the header up to its digest."""
    return blake3(data).digest(HEADER_DIGEST_BYTES)


MAGIC = b"KVFCHUNK"
VERSION = 2
ALIGNMENT = 4096
NAMESPACE_BYTES = 32
KEY_BYTES = range(16, 33)
NAME_BYTES = range(1, 32)
# A header is read as a whole before its digest is checked. This limits the cost of a damaged length.
MAX_HEADER_BYTES = 16 << 20

PREAMBLE = struct.Struct("<8s II Q II 32s B32s 31s")
GROUP = struct.Struct("<B31s II")
SECTION = struct.Struct("<B31s QQ II")

_U32 = (1 << 32) - 1
_U64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class ChunkSection:
    """A section of a chunk: a contiguous run of units of equal size.

    The units follow one another in the order of the tensor axis that is split over the ranks.
    """

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


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Offsets and sizes of the parts of a chunk file, in bytes."""

    sections: tuple[ChunkSection, ...]  # sections of all groups, in the order of the file
    tables: bytes  # encoded group table and section table of the header
    header_bytes: int  # length of the header with its digest, without padding
    offsets: tuple[int, ...]  # offset of each section in the file
    file_bytes: int

    @staticmethod
    # A model has few groups, and this is called for each chunk.
    @lru_cache(maxsize=16)
    def of(groups: tuple[ChunkGroup, ...]) -> ChunkLayout:
        """Compute the layout of a chunk file."""
        _check_different("chunk", "group", [group.name for group in groups])
        sections = tuple(section for group in groups for section in group.sections)
        digests = UNIT_DIGEST_BYTES * sum(section.units for section in sections)
        tables = GROUP.size * len(groups) + SECTION.size * len(sections)
        header_bytes = PREAMBLE.size + tables + digests + HEADER_DIGEST_BYTES
        if header_bytes > MAX_HEADER_BYTES:
            too_long = f"a header of {header_bytes} bytes; at most {MAX_HEADER_BYTES}"
            raise ChunkError(f"{too_long}: use larger units")
        sizes = (aligned(section.total_bytes) for section in sections)
        *offsets, file_bytes = accumulate(sizes, initial=aligned(header_bytes))
        if file_bytes > _U64:
            raise ChunkError(f"a chunk of {file_bytes} bytes; at most {_U64}")
        rows = [
            *(GROUP.pack(*_name(group.name), group.tokens, len(group.sections)) for group in groups),
            *(
                SECTION.pack(*_name(one.name), offset, one.unit_bytes, one.units, 0)
                for one, offset in zip(sections, offsets, strict=True)
            ),
        ]
        return ChunkLayout(sections, b"".join(rows), header_bytes, tuple(offsets), file_bytes)


@dataclass(frozen=True)
class Chunk:
    """The identity of a chunk, and the layout of its file."""

    namespace: bytes  # digest of the namespace, 32 bytes
    key: bytes  # digest that identifies the content within the namespace, 16 to 32 bytes
    groups: tuple[ChunkGroup, ...]  # one or more, with different names
    layout: ChunkLayout = field(init=False, repr=False, compare=False)  # derived from the groups

    def __post_init__(self) -> None:
        if len(self.namespace) != NAMESPACE_BYTES:
            raise ChunkError(f"a namespace of {len(self.namespace)} bytes; expected {NAMESPACE_BYTES}")
        if len(self.key) not in KEY_BYTES:
            raise ChunkError(f"a key of {len(self.key)} bytes; expected {KEY_BYTES[0]} to {KEY_BYTES[-1]}")
        object.__setattr__(self, "layout", ChunkLayout.of(self.groups))

    @property
    def sections(self) -> tuple[ChunkSection, ...]:
        return self.layout.sections

    @property
    def header_bytes(self) -> int:
        return self.layout.header_bytes

    @property
    def offsets(self) -> tuple[int, ...]:
        return self.layout.offsets

    @property
    def file_bytes(self) -> int:
        return self.layout.file_bytes

    @property
    def body_bytes(self) -> int:
        """Length of the file without its padded header."""
        return self.file_bytes - self.offsets[0]


def aligned(size: int) -> int:
    """Round a number of bytes up to a multiple of 4096."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def encode_header(chunk: Chunk, digests: bytes) -> bytes:
    """Return the header of a chunk file, padded with zeros to the start of the first section.

    Args:
        digests: concatenated digests of all units, in the order of the file, 16 bytes each.
    """
    layout = chunk.layout
    preamble = PREAMBLE.pack(
        *(MAGIC, VERSION, layout.header_bytes, layout.file_bytes, len(chunk.groups), len(layout.sections)),
        *(chunk.namespace, len(chunk.key), chunk.key, b""),
    )
    header = b"".join((preamble, layout.tables, digests))
    return (header + header_digest(header)).ljust(layout.offsets[0], b"\0")


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
