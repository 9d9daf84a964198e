"""Chunk files: what is written is read again, and nothing else is believed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from kvferry.common.errors import ChunkError
from kvferry.tiers.format import chunk as chunk_format
from kvferry.tiers.format.chunk import Chunk, ChunkGroup, ChunkSection, aligned, header_digest
from kvferry.tiers.format.decode import check_units, decode_header, header_span
from support.chunk_files import CHUNKS, content, image, verify_bytes
from support.examples import examples

_KV = ChunkGroup("full", 16, (ChunkSection("k", 3, 1000), ChunkSection("v", 3, 1000)))
_STATE = ChunkGroup("mamba", 0, (ChunkSection("ssm", 2, 4096),))
_CHUNK = Chunk(bytes(range(32)), b"0123456789abcdef", (_KV, _STATE))


@examples(60)
@given(CHUNKS)
def test_encoded_chunk_is_decoded(chunk):
    data = content(chunk)
    made = image(chunk, data)
    header = verify_bytes(made)
    assert header.chunk == chunk
    assert len(made) == chunk.file_bytes
    for section, offset, part in zip(chunk.sections, chunk.offsets, data, strict=True):
        assert offset % 4096 == 0
        assert made[offset : offset + section.total_bytes] == part


@examples(60)
@given(CHUNKS, st.data())
def test_a_changed_byte_anywhere_is_found(chunk, data):
    made = bytearray(image(chunk))
    at = data.draw(st.integers(0, len(made) - 1))
    made[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ChunkError):
        verify_bytes(made)


def test_each_byte_of_one_file_matters():
    made = bytearray(image(_CHUNK))
    for at in range(len(made)):
        made[at] ^= 0x20
        with pytest.raises(ChunkError):
            verify_bytes(made)
        made[at] ^= 0x20
    verify_bytes(made)


@examples(60)
@given(CHUNKS, st.data())
def test_a_file_cut_off_anywhere_is_found(chunk, data):
    made = image(chunk)
    with pytest.raises(ChunkError):
        verify_bytes(made[: data.draw(st.integers(0, len(made) - 1))])


def test_a_file_that_goes_on_after_its_end_is_found():
    with pytest.raises(ChunkError, match=r"a file of 20481 bytes; expected 20480 by its header"):
        verify_bytes(image(_CHUNK) + b"\0")


@examples(60)
@given(CHUNKS, st.data())
def test_units_are_checked_alone(chunk, data):
    made = image(chunk)
    header = decode_header(made)
    index = data.draw(st.integers(0, len(chunk.sections) - 1))
    section, offset = chunk.sections[index], chunk.offsets[index]
    first = data.draw(st.integers(0, section.units - 1))
    units = data.draw(st.integers(1, section.units - first))
    start = offset + first * section.unit_bytes
    part = bytearray(made[start : start + units * section.unit_bytes])
    check_units(header, index, first, part)
    at = data.draw(st.integers(0, len(part) - 1))
    part[at] ^= 1
    with pytest.raises(ChunkError, match=f"unit {first + at // section.unit_bytes} of section"):
        check_units(header, index, first, part)


def test_two_units_that_changed_places_are_found():
    made = bytearray(image(_CHUNK))
    at = _CHUNK.offsets[0]
    made[at : at + 1000], made[at + 1000 : at + 2000] = made[at + 1000 : at + 2000], made[at : at + 1000]
    with pytest.raises(ChunkError, match="unit 0 of section k"):
        verify_bytes(made)


@examples(60)
@given(st.binary(max_size=9000))
def test_any_bytes_are_refused_by_the_projects_own_error(data):
    with pytest.raises(ChunkError):
        verify_bytes(data)
    with pytest.raises(ChunkError):
        verify_bytes(image(_CHUNK)[:8] + b"\1\0\0\0" + data)


@examples(150)
@given(st.lists(st.tuples(st.integers(8, 400), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4))
def test_a_header_signed_by_a_liar_is_refused_or_is_the_one_image_of_its_chunk(changes):
    made = bytearray(image(_CHUNK))
    length = _CHUNK.header_bytes
    for at, value in changes:
        made[at : at + len(value)] = value
    made[length - 32 : length] = header_digest(made[: length - 32])
    header, said = tried(made)
    assert len(said) < 300
    assert "\n" not in said
    if header is not None:
        span = aligned(header.chunk.header_bytes)
        assert chunk_format.encode_header(header.chunk, header.digests) == made[:span]


def tried(made):
    try:
        return decode_header(made), ""
    except ChunkError as error:
        return None, str(error)


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        (0, b"KVFCHUNX", "not a chunk file: it begins with 4b56464348554e58, expected 4b56464348554e4b"),
        (8, b"\1", "a chunk of format version 1; this release reads versions 2 and 3"),
        (12, b"\xff\xff\xff\xff", "a header of 4294967295 bytes; expected 272 to 16777216"),
        (24, b"\xff\xff\xff\xff", "too short for 4294967295 groups and 3 sections"),
        (64, b"\x21", "a key of 33 bytes; expected 16 to 32"),
        (90, b"\1", "unused bytes of the header are not zero"),
        (128, b"\xff", "a name of 255 bytes; expected 1 to 31"),
        (128 + 2 * 40 + 40, b"\xff" * 8, "by the sections|a chunk of"),
        (
            128 + 2 * 40 + 40,
            b"\0\x40",
            "536 and 20480 bytes by the preamble; expected 536 and 65536 by the sections",
        ),
        (128 + 2 * 40 + 48, b"\xff" * 4, "a header of .* bytes; at most 16777216"),
    ],
)
def test_a_hostile_header_is_refused_in_one_sentence(at, value, said):
    made = bytearray(image(_CHUNK))
    made[at : at + len(value)] = value
    length = _CHUNK.header_bytes
    made[length - 32 : length] = header_digest(made[: length - 32])
    with pytest.raises(ChunkError, match=said):
        verify_bytes(made)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ChunkSection("k", 0, 1), "section k has 0 units"),
        (lambda: ChunkSection("", 1, 1), "a section named ''"),
        (lambda: ChunkSection("k" * 32, 1, 1), "expected 1 to 31 printable"),
        (lambda: ChunkSection("k\n", 1, 1), "printable"),
        (lambda: ChunkGroup("g", 1, ()), "group g without a section"),
        (
            lambda: ChunkGroup("g", 1, (ChunkSection("k", 1, 1), ChunkSection("k", 2, 1))),
            "named k, k; expected different",
        ),
        (lambda: ChunkGroup("g", -1, (ChunkSection("k", 1, 1),)), "holds -1 tokens"),
        (lambda: Chunk(b"", bytes(16), (_KV,)), "a namespace of 0 bytes"),
        (lambda: Chunk(bytes(32), bytes(15), (_KV,)), "a key of 15 bytes"),
        (lambda: Chunk(bytes(32), bytes(16), ()), "a chunk without a group"),
        (
            lambda: Chunk(bytes(32), bytes(16), (ChunkGroup("g", 1, (ChunkSection("k", 1 << 20, 1),)),)),
            "use larger",
        ),
    ],
)
def test_impossible_chunk_is_refused(make, said):
    with pytest.raises(ChunkError, match=said):
        make()


def test_a_damaged_header_is_known_by_its_checksum_before_anything_in_it_is_used():
    made = bytearray(image(_CHUNK))
    made[24] = 200
    with pytest.raises(ChunkError, match="the header is damaged: its checksum differs"):
        decode_header(made)


def test_the_header_is_found_from_the_first_bytes_of_a_file():
    made = image(_CHUNK)
    assert header_span(made[:128]) == _CHUNK.offsets[0] == 4096
    with pytest.raises(ChunkError, match="the header ends after 4095 of 4096 bytes"):
        decode_header(made[:4095])


def test_the_example_in_the_specification_is_what_the_code_writes():
    page = (Path(__file__).parents[4] / "docs" / "format.md").read_text()
    rows = re.findall(r"^([0-9a-f]{4})  ((?:[0-9a-f]{2} ){1,16})", page, re.MULTILINE)
    group = ChunkGroup("full", 16, (ChunkSection("kv", 2, 16),))
    chunk = Chunk(bytes(range(32)), bytes(range(0xA0, 0xB0)), (group,))
    made = image(chunk, [bytes(range(32))])
    shown = {int(at, 16) + index: byte for at, row in rows for index, byte in enumerate(bytes.fromhex(row))}
    assert {at: made[at] for at in shown} == shown
    # What the page leaves out is padding.
    assert not any(byte for at, byte in enumerate(made) if at not in shown)
    assert len(made) == 8192
    assert set(range(chunk.header_bytes)) <= set(shown)
