"""The encryption of a chunk file with AES-256-GCM. Nothing here does I/O.

    key of the operator + random salt of the file ─HKDF─▶ key of the file ─▶ segments and header

The body is encrypted in *segments* of 1 MiB, in place: a byte of the body has the same offset in both files.
The nonce of a segment is its number, so no nonce repeats under the key of a file, and each file has a key of
its own. The tags of the segments stand in the header. The header has a tag itself, which authenticates all
bytes before it: namespace, key, groups, salt, and the tags of the segments. So no file can take the name of
another, and no segment another place. `docs/format.md` specifies every byte.
"""

from __future__ import annotations

import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from xxhash import xxh3_128_digest

from kvferry.common.errors import ChunkError, OtherKey
from kvferry.tiers.format.chunk import (
    SEGMENT_BYTES,
    TAG_BYTES,
    Chunk,
    aligned,
    encode_header,
    header_start,
)
from kvferry.tiers.format.decode import ChunkHeader, zero_padding
from kvferry.tiers.format.encryption import SECRET_BYTES, EncryptionKey, EncryptionKeys, EncryptionRecord

_SALT_BYTES = 32
_NONCE_BYTES = 12
_PURPOSE = b"kvferry chunk file, format version 3"
# No file has so many segments.
_HEADER_NONCE = b"\xff" * _NONCE_BYTES


def encrypted_room(chunk: Chunk) -> int:
    """Return the bytes of memory that `encrypt_chunk` needs for a file."""
    return aligned(chunk.file_bytes + TAG_BYTES)


def encrypt_chunk(chunk: Chunk, body: memoryview, key: EncryptionKey, room: memoryview) -> memoryview:
    """Encrypt a chunk into `room`, and return the part of it that is the file of the chunk.

    The padding of `body` is set to zero. `room` has `encrypted_room` bytes.
    """
    zero_padding(chunk, body)
    salt, begin = os.urandom(_SALT_BYTES), chunk.offsets[0]
    cipher, digests, tags, view = _cipher(key, salt), bytearray(), bytearray(), body.cast("B")
    for number, at in enumerate(range(0, chunk.body_bytes, SEGMENT_BYTES)):
        end = min(at + SEGMENT_BYTES, chunk.body_bytes)
        # The cipher writes the tag behind the segment, where the next segment then overwrites it.
        behind = begin + end + TAG_BYTES
        cipher.encrypt_into(_nonce(number), view[at:end], None, room[begin + at : behind])
        tags += room[behind - TAG_BYTES : behind]
        digests += xxh3_128_digest(room[begin + at : begin + end])
    unsigned = EncryptionRecord(key.id, salt, bytes(digests), bytes(tags), b"")
    tag = cipher.encrypt(_HEADER_NONCE, b"", header_start(chunk) + unsigned.authenticated)
    room[:begin] = encode_header(chunk, unsigned.authenticated + tag)
    return room[: chunk.file_bytes]


class SegmentCipher:
    """Decrypts the segments of one file, in any order. Thread-safe.

    Raise ChunkError if the file is not encrypted. Raise OtherKey if `keys` has no key with the id in the
    header, or if the tag of the header does not fit: then another key has this id, or the header was forged.
    """

    def __init__(self, header: ChunkHeader, keys: EncryptionKeys) -> None:
        record = header.encryption
        if record is None:
            # Whoever can write to the storage could plant it.
            raise ChunkError("it is not encrypted, expected an encrypted chunk")
        self._tags = record.tags
        self._cipher = _cipher(keys.find(record.key_id), record.salt)
        authenticated = header_start(header.chunk) + record.authenticated
        try:
            self._cipher.decrypt(_HEADER_NONCE, record.header_tag, authenticated)
        except InvalidTag as error:
            # Damage by accident has failed the digest of the header before.
            raise OtherKey(
                f"its header is not one of key {record.key_id!r}: another key has this id elsewhere, or the "
                "header was forged"
            ) from error

    def decrypt(self, first: int, room: memoryview, into: memoryview) -> None:
        """Decrypt segments from number `first` on, and verify each. Raise ChunkError for a damaged one.

        Args:
            room: the encrypted bytes, and 16 bytes behind them. Mutated.
            into: as long as the encrypted bytes. Not valid after an error.
        """
        # The cipher expects the tag behind its segment, where the next segment begins: the last one is first.
        for at in reversed(range(0, len(into), SEGMENT_BYTES)):
            end = min(at + SEGMENT_BYTES, len(into))
            number = first + at // SEGMENT_BYTES
            room[end : end + TAG_BYTES] = self._tags[number * TAG_BYTES : (number + 1) * TAG_BYTES]
            try:
                self._cipher.decrypt_into(_nonce(number), room[at : end + TAG_BYTES], None, into[at:end])
            except InvalidTag as error:
                raise ChunkError(
                    f"encrypted segment {number} is damaged or forged: its tag differs"
                ) from error


def _cipher(key: EncryptionKey, salt: bytes) -> AESGCM:
    return AESGCM(HKDF(SHA256(), SECRET_BYTES, salt, _PURPOSE).derive(key.secret))


def _nonce(number: int) -> bytes:
    return number.to_bytes(_NONCE_BYTES, "little")
