"""Encrypted files, read as docs/format.md says."""

from __future__ import annotations

import hmac
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, strategies as st
from xxhash import xxh3_128_digest

from kvferry.common.errors import ChunkError, OtherKey
from kvferry.tiers.files.chunk_file import whole_pages
from kvferry.tiers.format.chunk import Chunk
from kvferry.tiers.format.cipher import encrypt_chunk, encrypted_room
from kvferry.tiers.format.encryption import EncryptionKey
from support.chunk_files import CHUNKS, body_of, verify_bytes
from support.encrypted import (
    BODY,
    DIGESTS,
    HEADER_DIGEST,
    HEADER_TAG,
    PARTS,
    SEGMENTS,
    TABLES,
    TAGS,
    encrypted_chunk,
    keys,
    segment,
)

PAGE = Path(__file__).parents[4] / "docs" / "format.md"


def file_of(chunk: Chunk) -> bytes:
    return bytes(encrypt_chunk(chunk, body_of(chunk), keys("a").newest, whole_pages(encrypted_room(chunk))))


def key_of_file(secret: bytes, salt: bytes) -> bytes:
    """HKDF-SHA256 (RFC 5869) for one block of output."""
    extracted = hmac.digest(salt, secret, "sha256")
    return hmac.digest(extracted, b"kvferry chunk file, format version 3\1", "sha256")


def test_the_key_of_the_example_is_right():
    assert f"`{key_of_file(bytes(range(32)), bytes(range(32, 64))).hex()}`" in PAGE.read_text()


def test_a_reader_made_by_the_specification_reads_a_file():
    chunk = encrypted_chunk(1)
    data, body = bytearray(file_of(chunk)), body_of(chunk)
    assert (data[8:12], data[TABLES : TABLES + 3]) == (b"\3\0\0\0", b"\1a\0")
    cipher = AESGCM(key_of_file(keys("a").newest.secret, data[TABLES + 32 : DIGESTS]))
    tag = bytes(data[HEADER_TAG:HEADER_DIGEST])
    assert cipher.decrypt(b"\xff" * 12, tag, bytes(data[:HEADER_TAG])) == b""
    parts = []
    for number in range(SEGMENTS):
        text, at = bytes(data[segment(data, number)]), 16 * number
        assert data[DIGESTS + at : DIGESTS + at + 16] == xxh3_128_digest(text)
        nonce = number.to_bytes(12, "little")
        parts.append(cipher.decrypt(nonce, text + bytes(data[TAGS + at : TAGS + at + 16]), None))
    # `body_of` leaves what was there between sections; a writer sets it to zero.
    written = b"".join(parts)
    starts = [offset - BODY for offset in chunk.offsets]
    for at, section in zip(starts, chunk.sections, strict=True):
        assert written[at : at + section.total_bytes] == body[at : at + section.total_bytes]
    assert written[starts[-1] + chunk.sections[-1].total_bytes :].strip(b"\0") == b""


@given(CHUNKS, st.data())
def test_a_changed_bit_anywhere_is_noticed_without_the_key(drawn, data):
    chunk = Chunk(drawn.namespace, drawn.key, drawn.groups, encrypted=True)
    file = bytearray(file_of(chunk))
    assert verify_bytes(bytes(file)).chunk == chunk
    at = data.draw(st.integers(0, len(file) - 1))
    file[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ChunkError):
        verify_bytes(bytes(file))


@pytest.mark.parametrize("part", PARTS)
def test_each_part_is_noticed_without_the_key(part):
    data = bytearray(file_of(encrypted_chunk(1)))
    data[PARTS[part]] ^= 1
    with pytest.raises(ChunkError):
        verify_bytes(bytes(data))


def test_an_unknown_key_is_named():
    with pytest.raises(OtherKey, match="it is encrypted with key 'b', which key_file does not have"):
        keys("a").find("b")
    assert keys("a", "b").find("b") == EncryptionKey("b", keys("b").newest.secret)
