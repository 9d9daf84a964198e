"""The keys of encrypted chunk files, and the part of a header that only encrypted files have."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.common.errors import ChunkError, OtherKey
from kvferry.tiers.format.chunk import ENCRYPTION, TAG_BYTES

KEY_ID_BYTES = range(1, 32)
SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class EncryptionKey:
    """A key of the operator. Files are encrypted with keys that derive from it."""

    id: str  # name in the key file, which the header of each file repeats: 1 to 31 printable characters
    secret: bytes = field(repr=False)  # 32 random bytes


@dataclass(frozen=True, slots=True)
class EncryptionKeys:
    """The keys of a tier, with different ids. The first encrypts, and each decrypts what it encrypted."""

    keys: tuple[EncryptionKey, ...]  # one or more

    @property
    def newest(self) -> EncryptionKey:
        return self.keys[0]

    def find(self, key_id: str) -> EncryptionKey:
        """Return the key with an id, or raise OtherKey."""
        for key in self.keys:
            if key.id == key_id:
                return key
        raise OtherKey(f"it is encrypted with key {key_id!r}, which key_file does not have")


@dataclass(frozen=True, slots=True)
class EncryptionRecord:
    """The part of the header of an encrypted file that other files lack."""

    key_id: str
    salt: bytes  # 32 random bytes
    digests: bytes  # XXH3-128 of each segment as it is stored, 16 bytes each, for checks without the key
    tags: bytes  # tag of each segment, 16 bytes each
    header_tag: bytes  # tag of the header, 16 bytes

    def encode(self) -> bytes:
        return self.authenticated + self.header_tag

    @property
    def authenticated(self) -> bytes:
        """The part of the record that the tag of the header authenticates."""
        key_id = self.key_id.encode("ascii")
        return ENCRYPTION.pack(len(key_id), key_id, self.salt) + self.digests + self.tags

    @classmethod
    def decode(cls, data: bytes) -> EncryptionRecord:
        """Decode a record. Its length fits the body of its file."""
        size, key_id, salt = ENCRYPTION.unpack_from(data)
        if size not in KEY_ID_BYTES or any(key_id[size:]):
            raise ChunkError(f"the id of a key has {size} bytes, or bytes after it; expected 1 to 31")
        if not is_key_id(text := key_id[:size].decode("latin-1")):
            raise ChunkError(f"a key has the id {text!r}; expected printable ASCII characters without spaces")
        each = (len(data) - ENCRYPTION.size - TAG_BYTES) // 2
        tags = ENCRYPTION.size + each
        return cls(text, salt, data[ENCRYPTION.size : tags], data[tags:-TAG_BYTES], data[-TAG_BYTES:])


def is_key_id(text: str) -> bool:
    """Return whether a text can be the id of a key: 1 to 31 printable ASCII characters without spaces."""
    return len(text) in KEY_ID_BYTES and text.isascii() and text.isprintable() and " " not in text
