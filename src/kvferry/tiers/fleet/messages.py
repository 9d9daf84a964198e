"""The messages of the fleet channel, over which an engine reads chunks in another engine's host memory.

    reader                                          holder
    AskHeld (keys of a prompt's chunks) ──────────▶ Held (which of them are in host memory)
    AskMemory (once per run of the holder) ───────▶ HostMemory (transport metadata of the arena)
    AskChunk (a key) ─────────────────────────────▶ ChunkPlace (offset and digest), or NoChunk
    (READ of the chunk; the reader computes the digest of what has arrived, and compares it)

The holder keeps no lease for a reader. If it evicts the chunk and reuses the slot during the READ, the digest
differs, and the chunk counts as missing.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.common.errors import ProtocolError
from kvferry.geometry import Region
from kvferry.tiers.format.chunk import HEADER_DIGEST_BYTES, NAMESPACE_BYTES
from kvferry.transport.messages import MAX_AGENT_BYTES, WORD_BYTES, as_protocol_error
from kvferry.transport.redeem import HalfWord

PROTOCOL = 1
MAX_KEYS = 16_384  # maximum number of keys in a message; a reader asks for longer prompts in several
MAX_REQUEST_BYTES = 1 << 20
MAX_REPLY_BYTES = MAX_AGENT_BYTES + (64 << 10)

_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Address = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Size = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
_Incarnation = Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]
_Namespace = Annotated[bytes, msgspec.Meta(min_length=NAMESPACE_BYTES, max_length=NAMESPACE_BYTES)]
_Key = Annotated[bytes, msgspec.Meta(min_length=16, max_length=32)]
_Agent = Annotated[bytes, msgspec.Meta(max_length=MAX_AGENT_BYTES)]
_Digest = Annotated[bytes, msgspec.Meta(min_length=HEADER_DIGEST_BYTES, max_length=HEADER_DIGEST_BYTES)]


class AskHeld(msgspec.Struct, frozen=True, tag="ask-held"):
    """Request: which of these chunks of a namespace are in the holder's host memory."""

    number: _Number
    protocol: int
    namespace: _Namespace
    keys: Annotated[list[_Key], msgspec.Meta(min_length=1, max_length=MAX_KEYS)]


class Held(msgspec.Struct, frozen=True, tag="held"):
    """Reply: one bit per key, the first key in the highest bit of the first byte."""

    number: _Number
    incarnation: HalfWord
    bits: Annotated[bytes, msgspec.Meta(max_length=MAX_KEYS // 8)]

    @classmethod
    def of(cls, number: int, incarnation: int, mask: npt.NDArray[np.bool_]) -> Held:
        return cls(number, incarnation, np.packbits(mask).tobytes())

    def mask(self, keys: int) -> npt.NDArray[np.bool_]:
        """Return the bits of so many keys: bool of shape (keys,). Those that the reply lacks are False."""
        bits = np.frombuffer(self.bits.ljust(-(-keys // 8), b"\0"), np.uint8)
        return np.unpackbits(bits, count=keys).astype(np.bool_)


class AskMemory(msgspec.Struct, frozen=True, tag="ask-memory"):
    """Request for the transport metadata of the holder's arena."""

    number: _Number
    protocol: int


class HostMemory(msgspec.Struct, frozen=True, tag="host-memory"):
    """Reply: the holder's arena, and the transport metadata with which it can be read.

    The word at `words_address` has the incarnation in its high half.
    """

    number: _Number
    incarnation: _Incarnation
    agent: _Agent
    address: _Address
    bytes: _Size
    words_address: _Address

    @property
    def claimed(self) -> tuple[Region, ...]:
        """The memory that the transport metadata must register."""
        return Region(self.address, self.bytes), Region(self.words_address, WORD_BYTES)


class AskChunk(msgspec.Struct, frozen=True, tag="ask-chunk"):
    """Request for the place and the digest of a chunk, which the reader will then read."""

    number: _Number
    protocol: int
    namespace: _Namespace
    key: _Key


class ChunkPlace(msgspec.Struct, frozen=True, tag="chunk-place"):
    """Reply: the place of a chunk in the holder's arena, and its digest (`content_digest`)."""

    number: _Number
    incarnation: _Incarnation
    offset: _Address
    bytes: _Size
    digest: _Digest


class NoChunk(msgspec.Struct, frozen=True, tag="no-chunk"):
    """Reply: the chunk cannot be read now. If `busy`, the holder has it, but serves no more for a moment."""

    number: _Number
    busy: bool = False


class OtherProtocol(msgspec.Struct, frozen=True, tag="other-protocol"):
    """Reply: the holder's release of kvferry uses another protocol."""

    number: _Number
    protocol: int


Request: TypeAlias = AskHeld | AskMemory | AskChunk
Reply: TypeAlias = Held | HostMemory | ChunkPlace | NoChunk | OtherProtocol

_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


def decode_request(data: bytes) -> Request:
    """Decode a reader's message. Raise ProtocolError if that fails, or a value is out of bounds."""
    with as_protocol_error("a request of the fleet channel"):
        message: Request = _requests.decode(data)
    return message


def decode_reply(data: bytes) -> Reply:
    """Decode a holder's reply. Raise ProtocolError if that fails, or a value is out of bounds."""
    with as_protocol_error("an answer of the fleet channel"):
        message: Reply = _replies.decode(data)
    if isinstance(message, HostMemory) and message.address + message.bytes >= 1 << 63:
        raise ProtocolError(
            f"{message.bytes} bytes of host memory at {message.address:#x}, expected them within 63 bits"
        )
    return message
