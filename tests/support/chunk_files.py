"""Chunks for tests: drawn by hypothesis, and made from a number."""

from __future__ import annotations

import hashlib
import os
from functools import partial

from hypothesis import strategies as st

from kvferry.tiers.files.chunk_file import read, set_direct, whole_pages
from kvferry.tiers.format.chunk import Chunk, ChunkGroup, ChunkSection
from kvferry.tiers.format.decode import ChunkHeader, make_header, verify

_NAMES = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=31)
_SECTIONS = st.builds(ChunkSection, _NAMES, st.integers(1, 9), st.one_of(st.integers(1, 40), st.just(4096)))


def _some(element):
    return st.lists(element, min_size=1, max_size=3, unique_by=lambda one: one.name).map(tuple)


GROUPS = _some(st.builds(ChunkGroup, _NAMES, st.integers(0, 2**32 - 1), _some(_SECTIONS)))
CHUNKS = st.builds(Chunk, st.binary(min_size=32, max_size=32), st.binary(min_size=16, max_size=32), GROUPS)


def content(chunk: Chunk) -> list[bytes]:
    """Bytes for the sections of a chunk that depend on its key, section and position."""
    return [
        hashlib.shake_128(chunk.key + bytes([index])).digest(section.total_bytes)
        for index, section in enumerate(chunk.sections)
    ]


def body_of(chunk: Chunk, data: list[bytes] | None = None) -> memoryview:
    """The chunk in memory, in whole pages, with what was there before between its sections."""
    made = whole_pages(chunk.body_bytes)
    made[:] = b"\xee" * chunk.body_bytes
    for offset, part in zip(chunk.offsets, content(chunk) if data is None else data, strict=True):
        start = offset - chunk.offsets[0]
        made[start : start + len(part)] = part
    return made


def image(chunk: Chunk, data: list[bytes] | None = None) -> bytes:
    """The file of a chunk."""
    body = body_of(chunk, data)
    return make_header(chunk, body) + body


def key(number: int) -> bytes:
    """The key of a chunk that tests know by a number. So short a key has no tenant."""
    return hashlib.sha256(b"%d" % number).digest()[:16]


def verify_bytes(data) -> ChunkHeader:
    """Verify a chunk file that is in memory; see `verify`."""
    view = memoryview(data)
    return verify(lambda at, size: view[at : at + size], len(view))


def verify_file(fd: int) -> ChunkHeader:
    """Read and check every byte of a file, through the page cache.

    Raises:
        ChunkError: the file is damaged.
        OSError: the file cannot be read.
    """
    set_direct(fd, on=False)
    return verify(partial(read, fd), os.fstat(fd).st_size)
