"""Messages of the control channel between schedulers: versioned, bounded, schema-checked.

    consumer                         producer
    Hello(facts)          ──────▶    compares facts
                          ◀──────    Accepted(facts) | Refused(differences)
    AskRanks(facts)       ──────▶    compares facts again, because it keeps no state of peers
                          ◀──────    Ranks(geometry, transport metadata, lease words of every rank)
    Redeem(ticket)        ──────▶    compares the prompts    (`transport.redeem`)
                          ◀──────    Redeemed(block tables, lease word, number of tokens)
                                     | Unchanged | NotRedeemed(reason)
    Heartbeat(tickets)    ──────▶    extends their leases    (no answer)
    Release(tickets)      ──────▶    ends this consumer's claims                (no answer)
    AskTurn(keys)         ──────▶    looks the keys up in the earlier turns that it keeps
                          ◀──────    Turns(those that share most chunks)

A ticket is a random id that names a lease: the producer's promise to keep KV blocks. A turn is a finished
request whose KV an engine keeps for the next turn of its conversation.

Compatibility is checked first: an incompatible peer never gets transport metadata, and the reply names every
difference. A ticket may be redeemed before the handshake has ended, because the grant is useless without the
transport metadata.

Facts are compared by name. A fact that only one side has does not count as a difference. A fact may be a
group of settings. In a group, a setting that only one side has counts as a difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, TypeAlias

import msgspec

from kvferry.geometry import RankGeometry
from kvferry.memory.sealed import SharedFile
from kvferry.terminal import shown
from kvferry.transport.check_ranks import check_ranks
from kvferry.transport.decode_errors import as_protocol_error
from kvferry.transport.redeem import Grant, Incarnation, NotRedeemed, Redeem, Redeemed, Ticket, Unchanged

PROTOCOL = 9
MAX_REQUEST_BYTES = 4 << 20
"""Maximum size in bytes of a message to a producer."""
MAX_REPLY_BYTES = 64 << 20
MAX_TICKETS = 4096
"""Maximum number of tickets in a message. A consumer with more tickets sends several messages."""
MAX_RANKS = 256
MAX_AGENT_BYTES = 4 << 20
MAX_DIFFERENCES = 64
MAX_SENTENCE = 1024
MAX_WORDS = 1 << 20
MAX_KEYS = 65_536
MAX_TURNS = 4
MAX_FACTS = 8192
MAX_NAMED = 12
"""Maximum number of differing settings of a group that a comparison names. It counts the others."""

# The reader prepares one descriptor per word that the peer claims to have, and computes addresses as int64.
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
"""A fact about an engine: a text, or a group of settings (value by name)."""

Host: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_.:%-]{1,255}\Z")]
"""A host to connect to: a name, or an IP address with an optional IPv6 zone."""

Port: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=65_535)]


class Facts(msgspec.Struct, frozen=True):
    """Description of an engine, which the engine sends to peers in handshakes.

    Attributes:
        engine_id: id of the engine.
        incarnation: random number that identifies this run of the engine.
        software: versions of the engine's software, for logs only.
        must_agree: maps the name of each property that determines the meaning of the engine's KV bytes to its
            value. If both engines have a property, but with different values, the producer refuses the
            consumer.
        keeps_turns: (host, port) at which the engine answers queries for earlier turns of conversations; None
            if it keeps no KV of earlier turns.
    """

    engine_id: EngineId
    incarnation: _Word
    software: Annotated[str, msgspec.Meta(max_length=1024)]
    must_agree: Annotated[dict[_Text, Fact], msgspec.Meta(max_length=MAX_FACTS)]
    keeps_turns: tuple[Host, Port] | None = None


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Request: opens a handshake with a producer (engine that offers KV).

    Attributes:
        protocol: protocol version of the consumer.
        facts: description of the consumer.
    """

    protocol: _Protocol
    facts: Facts


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """Reply: the producer can serve this consumer.

    Attributes:
        facts: description of the producer.
    """

    facts: Facts


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Reply: the producer cannot serve this consumer.

    Attributes:
        differences: differences between the two engines that are the reason, one sentence each.
    """

    differences: Annotated[list[_Sentence], msgspec.Meta(max_length=MAX_DIFFERENCES)]


class AskRanks(msgspec.Struct, frozen=True, tag="ask-ranks"):
    """Request: asks for the descriptions of all ranks of the producer.

    The request repeats the content of `Hello`, because the producer keeps no state about consumers.

    Attributes:
        protocol: protocol version of the consumer.
        facts: description of the consumer.
    """

    protocol: _Protocol
    facts: Facts


class Outgoing(msgspec.Struct, frozen=True):
    """The gather channel of a worker, and the staging area that belongs to the channel.

    Over the channel, readers ask the worker to pack cells (parts of blocks) into the staging area. Then
    they read the packed cells from there.

    Attributes:
        host, port: address of the gather channel.
        address, bytes: memory address and size of the staging area.
        words: number of words that show whether packed cells are valid: integers of 8 bytes in registered
            memory, which change before packed cells are overwritten. In the worker's array of words
            (`RankCard.words_address`), they follow the lease words.
        file: memory file that readers of the same machine can map instead (`shared_area`), as large as the
            staging area; None if there is none.
    """

    host: Host
    port: Port
    address: _Address
    bytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]
    words: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORDS)]
    file: SharedFile | None = None


class RankCard(msgspec.Struct, frozen=True):
    """Description of one worker of the producer.

    A word is an 8-byte integer in registered memory that changes before the memory that it protects is
    reused. A cell is the part of a block that moves as one unit.

    Attributes:
        geometry: addresses and layout of the worker's KV cache.
        agent: transport metadata of the worker's NIXL agent.
        words_address: memory address of the worker's first word.
        words: number of words; the words of leases come first.
        incarnation: random number that identifies this run of the worker, which is the high half of each of
            its words.
        outgoing: channel over which readers ask the worker to pack cells; None if the worker packs none.
    """

    geometry: RankGeometry
    agent: Annotated[bytes, msgspec.Meta(max_length=MAX_AGENT_BYTES)]
    words_address: _Address
    words: _Words
    incarnation: _HalfWord
    outgoing: Outgoing | None = None

    @property
    def leases(self) -> int:
        """Number of the worker's words (integers in registered memory) that belong to leases.

        The worker's other words belong to its staging area.
        """
        return self.words - (self.outgoing.words if self.outgoing else 0)


class Ranks(msgspec.Struct, frozen=True, tag="ranks"):
    """Reply: describes all workers of the producer.

    Attributes:
        ranks: description of every worker.
    """

    ranks: Annotated[list[RankCard], msgspec.Meta(max_length=MAX_RANKS)]


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Message without reply: extends leases.

    A lease must have been claimed by the consumer, unless it is a lease on an earlier turn: a finished
    request whose KV blocks the producer keeps for the next turn of the conversation.

    Attributes:
        consumer: incarnation of the consumer (random number that identifies its run).
        tickets: tickets (random ids) of the leases to extend.
    """

    consumer: Incarnation
    tickets: Tickets


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Message without reply: ends the consumer's claims on leases whose blocks it no longer needs.

    Attributes:
        consumer: incarnation of the consumer (random number that identifies its run).
        tickets: tickets (random ids) of the leases.
    """

    consumer: Incarnation
    tickets: Tickets


class AskTurn(msgspec.Struct, frozen=True, tag="ask-turn"):
    """Request: asks an engine for the earlier turns that share the most leading chunks with a prompt.

    An earlier turn is a finished request whose KV blocks an engine keeps for the next turn of its
    conversation. A chunk is a fixed number of tokens.

    Attributes:
        number: id of the query, repeated in the reply.
        chunk_tokens: number of tokens in a chunk.
        keys: key (digest of the content) of each whole chunk of the prompt, in order.
    """

    number: Annotated[int, msgspec.Meta(ge=0)]
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    keys: Annotated[list[_Key], msgspec.Meta(max_length=MAX_KEYS)]


class KeptTurn(msgspec.Struct, frozen=True):
    """A turn: a finished request whose KV blocks its engine keeps for the next turn of the conversation.

    `chunks` and `next_tokens` are the result of a query (`AskTurn`), which compares the turn with a prompt.

    Attributes:
        engine_id, incarnation: id of the engine that keeps the turn, and random number that identifies the
            engine's run.
        ticket: ticket (random id) that names the turn's lease.
        grant: block tables, and the word (integer in registered memory) that shows whether the lease is
            valid.
        tokens: number of tokens whose KV the blocks hold.
        min_prefix_tokens: number of tokens of the shortest prefix of the turn from which a reader can
            continue. For shorter prefixes, KV is missing: sliding windows have freed blocks, or recurrent
            state exists only after the last token.
        chunks: number of leading chunks that the turn and the prompt have in common.
        next_tokens: ids of the turn's tokens after the common chunks, at most `AskTurn.chunk_tokens` of them.
            The reader compares them with its prompt.
    """

    engine_id: EngineId
    incarnation: Incarnation
    ticket: Ticket
    grant: Grant
    tokens: _Count
    min_prefix_tokens: _Count = msgspec.field(name="least")
    chunks: _Count
    next_tokens: Annotated[list[_Word], msgspec.Meta(max_length=1 << 20)] = msgspec.field(name="after")

    def found(self, chunks: int, next_tokens: list[int]) -> KeptTurn:
        """Return a copy of this turn of a conversation for the reply to a query.

        Args:
            chunks: number of chunks that the turn shares with the query's prompt.
            next_tokens: token ids of the turn that follow these chunks.
        """
        return msgspec.structs.replace(self, chunks=chunks, next_tokens=next_tokens)


class Turns(msgspec.Struct, frozen=True, tag="turns"):
    """Reply: the earlier turns (finished requests) of conversations that a query found.

    Attributes:
        number: id of the query.
        kept: turns that share the most leading chunks with the prompt. `KeptTurn.chunks` is the same for all
            of them; they may differ in the tokens that follow.
    """

    number: int
    kept: Annotated[list[KeptTurn], msgspec.Meta(max_length=MAX_TURNS)]


Request: TypeAlias = Hello | AskRanks | Redeem | Heartbeat | Release | AskTurn
Reply: TypeAlias = Accepted | Refused | Ranks | Redeemed | Unchanged | NotRedeemed | Turns
Numbered: TypeAlias = Redeemed | Unchanged | NotRedeemed | Turns
"""Replies that repeat the number of their request. All other replies belong to a handshake."""

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)
_numbered = msgspec.msgpack.Decoder(Numbered)


def encode(message: Request | Reply) -> bytes:
    """Encode a request or a reply of the control channel as MessagePack."""
    return _encoder.encode(message)


def decode_request(data: bytes) -> Request:
    """Decode a consumer's message to the control channel of a producer.

    Raises:
        ProtocolError: the message cannot be decoded, or a value is out of bounds.
    """
    with as_protocol_error(f"a request of protocol {PROTOCOL}"):
        message: Request = _requests.decode(data)
    return message


def decode_reply(data: bytes) -> Reply:
    """Decode a producer's reply. If the reply describes ranks, check the descriptions.

    Raises:
        ProtocolError: the reply cannot be decoded, a value is out of bounds, or ranks contradict each other.
    """
    with as_protocol_error(f"an answer of protocol {PROTOCOL}"):
        message: Reply = _replies.decode(data)
        if isinstance(message, Ranks):
            check_ranks(message.ranks)
    return message


def decode_numbered(data: bytes) -> Numbered | None:
    """Decode a reply that repeats the id (`number`) of its request: Redeemed, NotRedeemed or Turns.

    Return None if the data is any other message or is malformed.
    """
    try:
        answer: Numbered = _numbered.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    return answer


def compare_facts(theirs: Mapping[str, Fact], ours: Mapping[str, Fact]) -> list[str]:
    """Compare the properties of two engines (`Facts.must_agree`), and return one sentence per difference.

    A property is a text, or a dictionary of settings. In a dictionary, each setting that differs or that only
    one side has is a difference. Of these, `MAX_NAMED` get a sentence each, and one sentence counts the rest.
    Properties that only one of the engines has are ignored.

    Args:
        theirs: properties of the engine that the sentences call "there", by name.
        ours: properties of the engine that the sentences call "here", by name.

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
    """Return a message that refuses a consumer because of these differences.

    The size of the message is limited: long sentences are cut off, and if there are too many sentences, the
    last one in the message says how many more there are.

    Args:
        differences: differences between the two engines, one sentence each.
    """
    said = [shown(text, MAX_SENTENCE) for text in differences[: MAX_DIFFERENCES - 1]]
    if more := len(differences) - len(said):
        said.append(f"{more} more differences")
    return Refused(said)


def _settings(name: str, theirs: dict[str, str], ours: dict[str, str]) -> Iterator[str]:
    """Yield one sentence for each setting that differs between two engines.

    After `MAX_NAMED` sentences, a last one says how many more settings differ.

    Args:
        name: name of the engine property that contains the settings, for the sentences.
        theirs: value of each setting of the peer, by name.
        ours: value of each setting of this engine, by name.
    """
    keys = [key for key in sorted(theirs.keys() | ours.keys()) if theirs.get(key) != ours.get(key)]
    for key in keys[:MAX_NAMED]:
        yield f"{name}: {key} is {theirs.get(key, 'not set')} there, {ours.get(key, 'not set')} here"
    if len(keys) > MAX_NAMED:
        yield f"{name}: {len(keys) - MAX_NAMED} more settings differ"


def _said(fact: Fact) -> str:
    return f"{len(fact)} settings" if isinstance(fact, dict) else fact
