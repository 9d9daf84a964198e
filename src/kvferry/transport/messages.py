"""What schedulers say to each other: versioned, bounded, schema-checked.

    consumer                         producer
    Hello(facts)          ──────▶    compares facts
                          ◀──────    Accepted(facts) | Refused(differences)
    AskRanks(facts)       ──────▶    compares them again: it may be the first word of a peer
                          ◀──────    Ranks(geometry, transport metadata, lease words of every rank)
    Heartbeat(leases)     ──────▶    extends them            (no answer)
    Release(leases)       ──────▶    ends them               (no answer)

Compatibility comes first: a peer that cannot be used never sees transport metadata, and learns of every
difference, not the first. Facts are compared by name; a fact that only one side states does not reject.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeAlias

import msgspec

from kvferry.errors import ProtocolError
from kvferry.geometry import RankGeometry
from kvferry.transport.wire import reading

PROTOCOL = 2
MAX_MESSAGE_BYTES = 64 << 20
MAX_LEASES = 65_536
MAX_WORDS = 1 << 20

# A list is prepared of as many words as a peer says it has, and addresses are computed with as int64.
_Words = Annotated[int, msgspec.Meta(ge=1, le=MAX_WORDS)]
_Address = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_HalfWord = Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]


class Facts(msgspec.Struct, frozen=True):
    """Who speaks.

    Attributes:
        engine_id: the engine's id.
        incarnation: which run of it.
        software: versions, for logs; never a reason to refuse.
        must_agree: what would make the bytes wrong if it differed, by name.
    """

    engine_id: str
    incarnation: int
    software: str
    must_agree: dict[str, str]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Opens a handshake."""

    protocol: int
    facts: Facts


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """The producer can serve this consumer."""

    facts: Facts


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """It cannot; why, a sentence each."""

    differences: list[str]


class AskRanks(msgspec.Struct, frozen=True, tag="ask-ranks"):
    """Asks for what is needed to read; states the facts again: the producer keeps no account of peers."""

    protocol: int
    facts: Facts


class Outgoing(msgspec.Struct, frozen=True):
    """Where a worker gathers for its readers.

    Attributes:
        host, port: of its gather channel.
        address, bytes: of the area that images are read from.
        words: how many of the worker's words, the last ones, belong to the area.
    """

    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65_535)]
    address: _Address
    bytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]
    words: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORDS)]


class RankCard(msgspec.Struct, frozen=True):
    """One worker of the producer.

    Attributes:
        geometry: where its pages lie.
        agent: its transport metadata.
        words_address, words: its words: address of the first, how many; leases' come first.
        incarnation: the high half of its words.
        outgoing: where it gathers, None if it does not.
    """

    geometry: RankGeometry
    agent: bytes
    words_address: _Address
    words: _Words
    incarnation: _HalfWord
    outgoing: Outgoing | None = None

    @property
    def leases(self) -> int:
        """How many of its words are leases'."""
        return self.words - (self.outgoing.words if self.outgoing else 0)


class Ranks(msgspec.Struct, frozen=True, tag="ranks"):
    """All workers of the producer."""

    ranks: list[RankCard]


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """The consumer still waits for these."""

    leases: list[str]


class Release(msgspec.Struct, frozen=True, tag="release"):
    """The consumer is done with these, or will never read them."""

    leases: list[str]


Request: TypeAlias = Hello | AskRanks | Heartbeat | Release
Reply: TypeAlias = Accepted | Refused | Ranks

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """A message as bytes."""
    return _encoder.encode(message)


def decode_request(data: bytes) -> Request:
    """A consumer's message.

    Raises:
        ProtocolError: it is none, or is out of bounds.
    """
    with reading(f"a request of protocol {PROTOCOL}"):
        message: Request = _requests.decode(data)
    if isinstance(message, Heartbeat | Release) and len(message.leases) > MAX_LEASES:
        raise ProtocolError(f"{len(message.leases)} leases in one message, at most {MAX_LEASES}")
    return message


def decode_reply(data: bytes) -> Reply:
    """A producer's answer; the geometry in it has been checked.

    Raises:
        ProtocolError: it is none, or its geometry contradicts itself.
    """
    with reading(f"an answer of protocol {PROTOCOL}"):
        message: Reply = _replies.decode(data)
        if isinstance(message, Ranks):
            for card in message.ranks:
                card.geometry.check()
    return message


def compare(theirs: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    """Every fact on which both speak and differ, a sentence each."""
    return [
        f"{name}: {theirs[name]} there, {ours[name]} here"
        for name in ours
        if name in theirs and theirs[name] != ours[name]
    ]
