"""Messages between schedulers: versioned, bounded, schema-checked.

    consumer                         producer
    Hello(facts)          ──────▶    compares facts
                          ◀──────    Accepted(facts) | Refused(differences)
    AskRanks(facts)       ──────▶    compares facts again, because it keeps no state of peers
                          ◀──────    Ranks(geometry, transport metadata, lease words of every rank)
    Redeem(ticket)        ──────▶    compares the prompt     (`transport.redeem`)
                          ◀──────    Redeemed(block tables, lease word) | NotRedeemed(reason)
    Heartbeat(tickets)    ──────▶    extends their leases    (no answer)
    Release(tickets)      ──────▶    ends this consumer's claims                (no answer)
    AskTurn(keys)         ──────▶    looks the keys up in the earlier turns that it keeps
                          ◀──────    Turns(those that share most chunks)

Compatibility is checked first: a peer that cannot be used never gets transport metadata, and is told every
difference. A ticket may be redeemed before the handshake has ended, because the grant is useless without the
rest. Facts are compared by name. A fact that only one side has is no difference. A fact may be a group of
settings by name, in which a setting that only one side has is a difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, TypeAlias

import msgspec

from kvferry.geometry import RankGeometry
from kvferry.terminal import shown
from kvferry.transport.check_ranks import check_ranks
from kvferry.transport.decode_errors import as_protocol_error
from kvferry.transport.redeem import Grant, Incarnation, NotRedeemed, Redeem, Redeemed, Ticket

PROTOCOL = 6
MAX_REQUEST_BYTES = 4 << 20
"""Maximum bytes of a message to a producer, before authentication too."""
MAX_REPLY_BYTES = 64 << 20
MAX_TICKETS = 4096
"""Maximum number of tickets in one message; a consumer with more sends several."""
MAX_RANKS = 256
MAX_AGENT_BYTES = 4 << 20
MAX_DIFFERENCES = 64
MAX_SENTENCE = 1024
MAX_WORDS = 1 << 20
MAX_KEYS = 65_536
MAX_TURNS = 4
MAX_FACTS = 8192
MAX_NAMED = 12
"""Maximum number of settings of a group that a comparison names; it counts the others."""

# A list is prepared of as many words as a peer says it has, and addresses are computed with as int64.
_Words = Annotated[int, msgspec.Meta(ge=1, le=MAX_WORDS)]
_Address = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_HalfWord = Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]
_Word = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Key = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]

Tickets: TypeAlias = Annotated[list[Ticket], msgspec.Meta(max_length=MAX_TICKETS)]

_Text = Annotated[str, msgspec.Meta(max_length=4096)]
_Sentence = Annotated[str, msgspec.Meta(max_length=16 * MAX_SENTENCE)]
_Protocol = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]

EngineId: TypeAlias = Annotated[str, msgspec.Meta(max_length=256)]

Fact: TypeAlias = _Text | Annotated[dict[_Text, _Text], msgspec.Meta(max_length=MAX_FACTS)]
"""A fact about an engine: a text, or a group of settings by name."""

Host: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_.:%-]{1,255}\Z")]
"""A host that can be dialled: a name, or an address, with an optional IPv6 zone."""

Port: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=65_535)]


class Facts(msgspec.Struct, frozen=True):
    """Facts about the engine that sends a message.

    Attributes:
        engine_id: the engine's id.
        incarnation: random number of this run of the engine.
        software: versions, for logs only.
        must_agree: facts that decide what the bytes mean, by name; a difference refuses the peer.
        keeps_turns: address at which it answers queries for earlier turns; None if it keeps none.
    """

    engine_id: EngineId
    incarnation: _Word
    software: Annotated[str, msgspec.Meta(max_length=1024)]
    must_agree: Annotated[dict[_Text, Fact], msgspec.Meta(max_length=MAX_FACTS)]
    keeps_turns: tuple[Host, Port] | None = None


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Opens a handshake."""

    protocol: _Protocol
    facts: Facts


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """The producer can serve this consumer."""

    facts: Facts


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The producer cannot serve this consumer; one sentence per reason."""

    differences: Annotated[list[_Sentence], msgspec.Meta(max_length=MAX_DIFFERENCES)]


class AskRanks(msgspec.Struct, frozen=True, tag="ask-ranks"):
    """Asks for the ranks. Repeats the facts, because the producer keeps no state of peers."""

    protocol: _Protocol
    facts: Facts


class Outgoing(msgspec.Struct, frozen=True):
    """The gather channel of a worker.

    Attributes:
        host, port: address of the gather channel.
        address, bytes: address and size of the area that packed cells are read from.
        words: number of the worker's words that belong to the area; they are its last ones.
    """

    host: Host
    port: Port
    address: _Address
    bytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]
    words: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORDS)]


class RankCard(msgspec.Struct, frozen=True):
    """One worker of the producer.

    Attributes:
        geometry: its geometry, with the addresses of its pages.
        agent: its transport metadata.
        words_address, words: address of its first word, number of words; those of leases come first.
        incarnation: the high half of its words.
        outgoing: its gather channel; None if it does not gather.
    """

    geometry: RankGeometry
    agent: Annotated[bytes, msgspec.Meta(max_length=MAX_AGENT_BYTES)]
    words_address: _Address
    words: _Words
    incarnation: _HalfWord
    outgoing: Outgoing | None = None

    @property
    def leases(self) -> int:
        """Number of lease words among its words."""
        return self.words - (self.outgoing.words if self.outgoing else 0)


class Ranks(msgspec.Struct, frozen=True, tag="ranks"):
    """All workers of the producer."""

    ranks: Annotated[list[RankCard], msgspec.Meta(max_length=MAX_RANKS)]


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Extends the leases that the consumer has claimed with these tickets."""

    consumer: Incarnation
    tickets: Tickets


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Ends the consumer's claims on these tickets."""

    consumer: Incarnation
    tickets: Tickets


class AskTurn(msgspec.Struct, frozen=True, tag="ask-turn"):
    """Asks for an earlier turn that begins as a prompt does.

    Attributes:
        number: number of the query, echoed in the reply.
        chunk_tokens: tokens of a chunk.
        keys: keys of the prompt's whole chunks, from the first on.
    """

    number: Annotated[int, msgspec.Meta(ge=0)]
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    keys: Annotated[list[_Key], msgspec.Meta(max_length=MAX_KEYS)]


class KeptTurn(msgspec.Struct, frozen=True):
    """A finished request whose blocks its engine keeps for a while.

    Attributes:
        engine_id, incarnation: the engine that keeps it.
        ticket: the ticket of its lease.
        grant: the grant for a reader.
        tokens: number of tokens in the blocks.
        least: length of the shortest prefix that a reader can continue from. Sliding windows limit it, and
            recurrent state exists only after all tokens.
        chunks: number of chunks that it shares with the query.
        after: tokens that follow these chunks.
    """

    engine_id: EngineId
    incarnation: Incarnation
    ticket: Ticket
    grant: Grant
    tokens: _Count
    least: _Count
    chunks: _Count
    after: Annotated[list[_Word], msgspec.Meta(max_length=1 << 20)]

    def found(self, chunks: int, after: list[int]) -> KeptTurn:
        """Return a copy for a query that shares `chunks` chunks, followed by the tokens `after`."""
        return msgspec.structs.replace(self, chunks=chunks, after=after)


class Turns(msgspec.Struct, frozen=True, tag="turns"):
    """The turns found for query `number`. All share the same chunks and differ in the tokens after them."""

    number: int
    kept: Annotated[list[KeptTurn], msgspec.Meta(max_length=MAX_TURNS)]


Request: TypeAlias = Hello | AskRanks | Redeem | Heartbeat | Release | AskTurn
Reply: TypeAlias = Accepted | Refused | Ranks | Redeemed | NotRedeemed | Turns
Numbered: TypeAlias = Redeemed | NotRedeemed | Turns
"""Replies to requests that have a number; the other replies belong to a handshake."""

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)
_numbered = msgspec.msgpack.Decoder(Numbered)


def encode(message: Request | Reply) -> bytes:
    """Encode a message."""
    return _encoder.encode(message)


def decode_request(data: bytes) -> Request:
    """Decode a consumer's message.

    Raises:
        ProtocolError: it cannot be decoded, or is out of bounds.
    """
    with as_protocol_error(f"a request of protocol {PROTOCOL}"):
        message: Request = _requests.decode(data)
    return message


def decode_reply(data: bytes) -> Reply:
    """Decode a producer's reply and check its ranks.

    Raises:
        ProtocolError: it cannot be decoded, or its ranks are out of bounds or contradict each other.
    """
    with as_protocol_error(f"an answer of protocol {PROTOCOL}"):
        message: Reply = _replies.decode(data)
        if isinstance(message, Ranks):
            check_ranks(message.ranks)
    return message


def decode_numbered(data: bytes) -> Numbered | None:
    """Decode a reply that has the number of its request; return None for other messages."""
    try:
        answer: Numbered = _numbered.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    return answer


def compare_facts(theirs: Mapping[str, Fact], ours: Mapping[str, Fact]) -> list[str]:
    """Return one sentence per differing fact that both sides have, or per differing setting of a group.

    >>> theirs = {"dtype": "float16", "rope": {"theta": "1"}}
    >>> compare_facts(theirs, {"dtype": "float32", "rope": {"theta": "2"}})
    ['dtype: float16 there, float32 here', 'rope: theta is 1 there, 2 here']
    """
    found: list[str] = []
    for name in ours:
        if name in theirs and (a := theirs[name]) != (b := ours[name]):
            if isinstance(a, dict) and isinstance(b, dict):
                found += _settings(name, a, b)
            else:
                found.append(f"{name}: {_said(a)} there, {_said(b)} here")
    return found


def make_refusal(differences: Sequence[str]) -> Refused:
    """Return a refusal with these differences, shortened if they exceed the limits of a message."""
    said = [shown(text, MAX_SENTENCE) for text in differences[: MAX_DIFFERENCES - 1]]
    if more := len(differences) - len(said):
        said.append(f"{more} more differences")
    return Refused(said)


def _settings(name: str, theirs: dict[str, str], ours: dict[str, str]) -> Iterator[str]:
    """Yield one sentence per setting that differs."""
    keys = [key for key in sorted(theirs.keys() | ours.keys()) if theirs.get(key) != ours.get(key)]
    for key in keys[:MAX_NAMED]:
        yield f"{name}: {key} is {theirs.get(key, 'not set')} there, {ours.get(key, 'not set')} here"
    if len(keys) > MAX_NAMED:
        yield f"{name}: {len(keys) - MAX_NAMED} more settings differ"


def _said(fact: Fact) -> str:
    return f"{len(fact)} settings" if isinstance(fact, dict) else fact
