"""Sealed grants: the answer to a ticket, encrypted into the offer, so that its consumer can read at once.

    producer: grant ─seal─▶ offer ─(clients, routers)─▶ consumer: open ─▶ the same grant

A random key of the producer's run encrypts and authenticates the grant. Handshakes give it to the peers. A
seal is bound to its ticket, to the producer's address and to the content of the prompt. The consumer states
these from its own prompt, so a seal that was changed, or that came with something else, does not open. Then
the ticket is redeemed as without a seal.

A seal says only which blocks held the prompt. The lease word, which is read after the data, tells whether
they still hold it.
"""

from __future__ import annotations

import base64
import binascii
import secrets
import zlib
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Annotated, Final

import msgspec
import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from msgspec.structs import astuple

from kvferry.common.errors import ProtocolError
from kvferry.transport.handshake import Address
from kvferry.transport.messages import PROTOCOL, SEAL_KEY_BYTES, as_protocol_error, encode
from kvferry.transport.redeem import (
    MAX_BLOCKS,
    MAX_GROUPS,
    Count,
    Grant,
    HalfWord,
    PromptContent,
)

MAX_SEAL: Final = 4096
"""Maximum length of a seal in characters, so that an offer fits into a header of 8 KiB."""

_MAX_SEALED_BLOCKS: Final = 1 << 16

# Number of bytes of block tables that are compressed between two looks at the length so far.
_PACKED_BYTES: Final = 1 << 14

_NONCE_BYTES = 12
_ID: Final = np.dtype("<u4")
_WHAT: Final = "a sealed grant"


@dataclass(frozen=True, slots=True)
class SealBinding:
    """The one use that a seal is for: a ticket of one producer, for the first `tokens` tokens of a prompt."""

    address: Address
    ticket: bytes
    tokens: int
    content: PromptContent

    def encoded(self) -> bytes:
        """Return what the encryption authenticates besides the grant. The ticket is part of its key."""
        return msgspec.msgpack.encode((PROTOCOL, *self.address, self.tokens, *astuple(self.content)))


class _Sealed(msgspec.Struct, frozen=True, array_like=True):
    """The encrypted part of a seal. `lengths` are in blocks; `blocks` are packed by `_pack`."""

    incarnation: HalfWord
    slot: Count
    generation: HalfWord
    lengths: Annotated[
        list[Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCKS)]], msgspec.Meta(max_length=MAX_GROUPS)
    ]
    blocks: bytes


_decoder = msgspec.msgpack.Decoder(_Sealed)


def seal_grant(key: bytes, grant: Grant, binding: SealBinding) -> str:
    """Return the grant of an engine's run as text; empty if it would be longer than `MAX_SEAL`.

    `key` is that of the producer's run, `SEAL_KEY_BYTES` long.
    """
    lengths = [len(table) // _ID.itemsize for table in grant.tables]
    if sum(lengths) > _MAX_SEALED_BLOCKS:
        return ""
    if (packed := _pack(grant.tables)) is None:
        return ""
    inner = _Sealed(grant.incarnation, grant.slot, grant.generation, lengths, packed)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    sealed = nonce + _cipher(key, binding).encrypt(nonce, encode(inner), binding.encoded())
    text = base64.urlsafe_b64encode(sealed).decode()
    return text if len(text) <= MAX_SEAL else ""


def open_seal(key: bytes, sealed: str, binding: SealBinding) -> Grant:
    """Return the grant in a seal.

    Raises:
        ProtocolError: the seal is not of this use, or was not made with this key.
    """
    if len(sealed) > MAX_SEAL:
        raise ProtocolError(f"a sealed grant of {len(sealed)} characters, at most {MAX_SEAL}")
    try:
        data = base64.b64decode(sealed, altchars=b"-_", validate=True)
        inner = _cipher(key, binding).decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], binding.encoded())
    except (InvalidTag, binascii.Error, ValueError) as error:
        raise ProtocolError(
            "a sealed grant does not open: it was changed on its way, or sealed by another run of the "
            "engine or for another ticket, address or prompt"
        ) from error
    with as_protocol_error(_WHAT):
        found = _decoder.decode(inner)
        tables = _unpack(found.lengths, found.blocks)
        return Grant(found.incarnation, found.slot, found.generation, binding.tokens, tables)


def _cipher(key: bytes, binding: SealBinding) -> AESGCM:
    # A key per ticket: random nonces of 96 bits under one key would repeat some day.
    return AESGCM(blake2b(binding.ticket, key=key, digest_size=SEAL_KEY_BYTES).digest())


def _pack(tables: list[bytes]) -> bytes | None:
    """Compress block tables, as differences of neighbouring ids, which are equal in runs of blocks.

    Return None if they would be longer than a seal.
    """
    steps = np.diff(np.frombuffer(b"".join(tables), _ID), prepend=_ID.type(0)).tobytes()
    packing, packed = zlib.compressobj(1), b""
    for begin in range(0, len(steps), _PACKED_BYTES):
        packed += packing.compress(steps[begin : begin + _PACKED_BYTES])
        # Compressing all of 65,536 scattered ids would take the engine's thread 6 ms, for nothing.
        if len(packed) > MAX_SEAL:
            return None
    return packed + packing.flush()


def _unpack(lengths: list[int], blocks: bytes) -> list[bytes]:
    """Return the block tables of `_pack`. Raise ValueError if they do not have these lengths."""
    count = sum(lengths)
    if count > _MAX_SEALED_BLOCKS:
        raise ValueError(f"{count} sealed blocks, at most {_MAX_SEALED_BLOCKS}")
    size, unpacking = count * _ID.itemsize, zlib.decompressobj()
    try:
        data = unpacking.decompress(blocks, size + 1)
    except zlib.error as error:
        raise ValueError(f"its block tables cannot be unpacked: {error}") from error
    if len(data) != size:
        raise ValueError(f"block tables of {len(data)} bytes or more, expected {size}")
    ids = np.cumsum(np.frombuffer(data, _ID), dtype=_ID)  # modulo 2³², as the differences
    ends = np.cumsum([0, *lengths])
    return [ids[begin:end].tobytes() for begin, end in pairwise(ends)]
