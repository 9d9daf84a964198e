"""Keys of encrypted tiers, and changes to encrypted chunk files, for tests."""

from __future__ import annotations

import hashlib
from pathlib import Path

from blake3 import blake3
from xxhash import xxh3_128_digest

from kvferry.tiers.format.chunk import SEGMENT_BYTES, Chunk, ChunkGroup, ChunkSection
from kvferry.tiers.format.encryption import EncryptionKey, EncryptionKeys
from support.chunk_files import key
from support.stores import NAMESPACE

# Three segments in two sections, the last segment shorter: a body of 2.5 MiB and 8 KiB.
GROUP = ChunkGroup("full", 64, (ChunkSection("k", 4, 320 << 10), ChunkSection("v", 4, (321 << 10) + 7)))
# Where an encrypted file of that group has the parts of its header, by docs/format.md.
TABLES = 128 + 40 + 2 * 56
SEGMENTS = 3
DIGESTS = TABLES + 64
TAGS = DIGESTS + 16 * SEGMENTS
HEADER_TAG = TAGS + 16 * SEGMENTS
HEADER_DIGEST = HEADER_TAG + 16
BODY = 4096


def keys(*ids: str) -> EncryptionKeys:
    """Keys with these ids, the same in every test."""
    return EncryptionKeys(tuple(EncryptionKey(one, hashlib.sha256(one.encode()).digest()) for one in ids))


def encrypted_chunk(number: int) -> Chunk:
    return Chunk(NAMESPACE.digest, key(number), (GROUP,), encrypted=True)


def segment(data: bytearray, number: int) -> slice:
    """Where a segment is in a file."""
    begin = BODY + number * SEGMENT_BYTES
    return slice(begin, min(begin + SEGMENT_BYTES, len(data)))


def with_digests(data: bytearray) -> bytearray:
    """A changed file with right digests: no more than anyone can compute who can write to the storage."""
    for number in range(SEGMENTS):
        digest = xxh3_128_digest(data[segment(data, number)])
        data[DIGESTS + 16 * number : DIGESTS + 16 * (number + 1)] = digest
    data[HEADER_DIGEST : HEADER_DIGEST + 32] = blake3(data[:HEADER_DIGEST]).digest(32)
    return data


def swap(data: bytearray, one: slice, other: slice) -> None:
    data[one], data[other] = data[other], data[one]


def swap_segments(data: bytearray) -> None:
    """The first two segments take each other's place, with their tags."""
    swap(data, segment(data, 0), segment(data, 1))
    swap(data, slice(TAGS, TAGS + 16), slice(TAGS + 16, TAGS + 32))


# Each part of an encrypted file, by the offset of a byte in it.
PARTS = {
    "magic": 0,
    "version": 8,
    "header length": 12,
    "file length": 16,
    "groups": 24,
    "sections": 28,
    "namespace": 32,
    "key length": 64,
    "key": 70,
    "zeros": 100,
    "group table": 130,
    "section table": 170,
    "length of the key id": TABLES,
    "key id": TABLES + 1,
    "zeros after the key id": TABLES + 20,
    "salt": TABLES + 40,
    "digest": DIGESTS + 16,
    "first tag": TAGS,
    "last tag": HEADER_TAG - 1,
    "tag of the header": HEADER_TAG,
    "digest of the header": HEADER_DIGEST,
    "padding of the header": BODY - 1,
    "first segment": BODY,
    "second segment": BODY + SEGMENT_BYTES + 5,
    "padding of a section": BODY + 4 * (320 << 10) + 4 * ((321 << 10) + 7),
    "last byte": -1,
}


def write_keys(path: Path, *ids: str) -> Path:
    """A key file with the keys of `keys`."""
    from base64 import b64encode

    lines = (f"{one.id} {b64encode(one.secret).decode()}\n" for one in keys(*ids).keys)
    path.write_text("".join(lines))
    path.chmod(0o600)
    return path
