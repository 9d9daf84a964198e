"""A chunk in memory is the body of its file."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from kvferry.common.errors import ChunkError
from kvferry.geometry.canonical import CanonicalGroup, FormSection, SectionField
from kvferry.geometry.rank import GroupKind
from kvferry.tiers.format.chunk import Chunk
from kvferry.tiers.format.decode import (
    check_body,
    chunk_group,
    decode_header,
    is_chunk,
    make_header,
)
from support.chunk_files import CHUNKS, image, verify_bytes
from support.examples import examples

PARTS = (SectionField("layers.0", "ssm", 4, (("channel", 9),)),)
CONV = (SectionField("layers.0", "conv", 2, (("width", 3),)),)
STATE = CanonicalGroup(
    GroupKind.STATE, 0, (FormSection("head", 3, 0, PARTS), FormSection("channel", 1024, 0, CONV))
)
CHUNK = Chunk(bytes(32), bytes(range(32)), (chunk_group(STATE, 0),))


def body() -> bytearray:
    made = bytearray(b"\xee" * STATE.chunk_bytes)  # what was in the slot before
    for number, (section, start) in enumerate(zip(STATE.sections, STATE.starts, strict=True)):
        made[start : start + section.bytes] = bytes((7 * i + number) % 251 for i in range(section.bytes))
    return made


def test_header_and_body_are_a_file() -> None:
    made = body()
    header = make_header(CHUNK, memoryview(made))
    assert verify_bytes(header + made).chunk == CHUNK
    check_body(decode_header(header), memoryview(made))
    assert is_chunk(CHUNK, header, memoryview(made))


@examples(60)
@given(CHUNKS, st.data())
def test_an_image_is_what_verifies_and_nothing_else(chunk: Chunk, data: st.DataObject) -> None:
    made = bytearray(image(chunk))
    start = chunk.offsets[0]
    assert is_chunk(chunk, made[:start], memoryview(made)[start:])
    other = replace(chunk, key=bytes([chunk.key[0] ^ 1]) + chunk.key[1:])
    assert not is_chunk(other, made[:start], memoryview(made)[start:])
    made[data.draw(st.integers(0, len(made) - 1))] ^= data.draw(st.integers(1, 255))
    assert not is_chunk(chunk, made[:start], memoryview(made)[start:])


@examples(60)
@given(CHUNKS)
def test_no_byte_of_a_body_is_looked_at_before_it_is_there(chunk: Chunk) -> None:
    good, start = image(chunk), chunk.offsets[0]
    arriving = bytearray(b"\xff" * chunk.body_bytes)

    def wait(size: int) -> None:
        arriving[:size] = good[start : start + size]

    assert is_chunk(chunk, good[:start], memoryview(arriving), wait)


@pytest.mark.parametrize("at", [0, 107, 108, 4095, 4096, 4096 + 6143, 4096 + 6144, 4096 + 8191])
def test_every_byte_of_a_body_counts(at: int) -> None:
    made = body()
    header = decode_header(make_header(CHUNK, memoryview(made)))
    made[at] ^= 1
    with pytest.raises(ChunkError, match=r"head\.3|channel\.1024"):
        check_body(header, memoryview(made))


def test_a_body_of_another_length_is_refused() -> None:
    with pytest.raises(ChunkError, match="a body of 4096 bytes; expected 12288"):
        make_header(CHUNK, memoryview(bytearray(4096)))
