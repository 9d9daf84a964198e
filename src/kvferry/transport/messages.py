"""Messages of the control channel between schedulers: versioned, bounded, schema-checked.

    consumer                         producer
    Hello(facts)          ──────▶    compares facts, and keeps no state of peers
                          ◀──────    PeerInfo(facts; geometry, transport metadata, lease words of every rank;
                                     seal key) | Refused(differences)
    Redeem(ticket)        ──────▶    compares the prompts    (`transport.redeem`)
                          ◀──────    Redeemed(block tables, lease word, number of tokens)
                                     | Unchanged | NotRedeemed(reason)
    Claim(tickets)        ──────▶    extends their leases, or ends this consumer's claims    (no answer)
    AskTurn(keys)         ──────▶    looks the keys up in the earlier turns that it keeps
                          ◀──────    Turns(those that share most chunks)

Compatibility is checked first: an incompatible peer never gets transport metadata, and the reply names every
difference. A ticket may be redeemed before the handshake has ended, because the grant is useless without the
transport metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, TypeAlias

import msgspec

from kvferry.common.errors import GeometryError, ProtocolError
from kvferry.common.text import shown
from kvferry.geometry import Layer, RankGeometry, Region
from kvferry.memory.shared_memory import SharedFile
from kvferry.transport.redeem import (
    Count,
    Grant,
    HalfWord,
    NotRedeemed,
    Redeem,
    Redeemed,
    Ticket,
    Unchanged,
)

PROTOCOL = 12
WORD_BYTES = 8
SEAL_KEY_BYTES = 32
MAX_REQUEST_BYTES = 4 << 20  # maximum size in bytes of a message to a producer
MAX_REPLY_BYTES = 64 << 20
# Maximum number of tickets in a message. A consumer with more tickets sends several messages.
MAX_TICKETS = 4096
MAX_RANKS = 256
MAX_AGENT_BYTES = 4 << 20
MAX_DIFFERENCES = 64
MAX_SENTENCE = 1024
MAX_WORDS = 1 << 20
MAX_KEYS = 65_536
MAX_TURNS = 4
MAX_FACTS = 8192
MAX_NAMED = 12  # maximum number of differing settings of a group that a comparison names

# Limits of the geometry of a rank.
MAX_NAME = 1024
MAX_GROUPS = 256
MAX_LAYERS = 4096
MAX_REGIONS = 4096
MAX_FIELDS = 64
MAX_AXES = 16
MAX_LOOPS = 16
MAX_FACTORS = 65_536

_ADDRESSES = 1 << 63  # addresses are computed as int64
_MEMORIES = ("DRAM", "VRAM")

# The reader prepares one descriptor per word that the peer claims to have, and computes addresses as int64,
# so a peer must not claim more.
_Words = Annotated[int, msgspec.Meta(ge=1, le=MAX_WORDS)]
_Address = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Incarnation = Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]
_Key = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]

Tickets: TypeAlias = Annotated[list[Ticket], msgspec.Meta(max_length=MAX_TICKETS)]

_Text = Annotated[str, msgspec.Meta(max_length=4096)]
_Sentence = Annotated[str, msgspec.Meta(max_length=16 * MAX_SENTENCE)]

EngineId: TypeAlias = Annotated[str, msgspec.Meta(max_length=256)]

# A fact about an engine: a text, or a group of settings (value by name).
Fact: TypeAlias = _Text | Annotated[dict[_Text, _Text], msgspec.Meta(max_length=MAX_FACTS)]

# A host to connect to: a name, or an IP address with an optional IPv6 zone.
Host: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_.:%-]{1,255}\Z")]

Port: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=65_535)]


class Facts(msgspec.Struct, frozen=True):
    """Description of an engine, which it sends to peers in handshakes.

    `must_agree` has the properties that decide the meaning of KV bytes (`compare_facts`).
    """

    engine_id: EngineId
    incarnation: HalfWord  # random number that identifies this run of the engine
    software: Annotated[str, msgspec.Meta(max_length=1024)]  # versions, for logs only
    must_agree: Annotated[dict[_Text, Fact], msgspec.Meta(max_length=MAX_FACTS)]
    keeps_turns: tuple[Host, Port] | None = None  # answers `AskTurn`; None if it keeps no turns


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Request: asks a producer for its description."""

    protocol: Count
    facts: Facts


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Reply: the producer cannot serve this consumer. Each difference is a sentence."""

    differences: Annotated[list[_Sentence], msgspec.Meta(max_length=MAX_DIFFERENCES)]


class Outgoing(msgspec.Struct, frozen=True):
    """The gather channel of a worker, and its staging area for readers, at `address` and `bytes` long."""

    host: Host
    port: Port
    address: _Address
    bytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]
    words: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORDS)]  # protect the area, behind those of leases
    file: SharedFile | None = None  # of the same size, which readers of the same machine can map instead


class RankCard(msgspec.Struct, frozen=True):
    """Description of one worker of the producer."""

    geometry: RankGeometry
    agent: Annotated[bytes, msgspec.Meta(max_length=MAX_AGENT_BYTES)]  # transport metadata
    words_address: _Address
    words: _Words  # those of leases come first
    incarnation: _Incarnation  # random number of this run of the worker, the high half of each of its words
    outgoing: Outgoing | None = None  # None if the worker gathers nothing

    @property
    def claimed(self) -> tuple[Region, ...]:
        """The memory that the transport metadata must register."""
        first, there = self.geometry.regions[0], self.outgoing
        area = () if there is None else (Region(there.address, there.bytes, first.memory, first.device),)
        return *self.geometry.regions, Region(self.words_address, WORD_BYTES * self.words), *area

    @property
    def leases(self) -> int:
        """Number of words that belong to leases, and not to the staging area."""
        return self.words - (self.outgoing.words if self.outgoing else 0)


class PeerInfo(msgspec.Struct, frozen=True, tag="peer"):
    """Reply: describes a producer that can serve this consumer, and all its workers.

    As the status of a peer: this engine can read from it. `seal_key` opens the grants in its offers
    (`transport.seal`). It is empty if they carry none.
    """

    facts: Facts
    ranks: Annotated[tuple[RankCard, ...], msgspec.Meta(max_length=MAX_RANKS)]
    seal_key: Annotated[bytes, msgspec.Meta(max_length=SEAL_KEY_BYTES)] = b""

    def __repr__(self) -> str:
        return f"PeerInfo({self.facts!r}, {self.ranks!r})"  # a log must not have the key


class Claim(msgspec.Struct, frozen=True, tag="claim"):
    """Message without reply: extends leases that the consumer has claimed, or that keep an earlier turn.

    If `released`, it ends the consumer's claims on them.
    """

    consumer: HalfWord
    tickets: Tickets
    released: bool = False


class AskTurn(msgspec.Struct, frozen=True, tag="ask-turn"):
    """Request for the turns that share most leading chunks with a prompt. `keys` are of its whole chunks."""

    number: Annotated[int, msgspec.Meta(ge=0)]
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    keys: Annotated[list[_Key], msgspec.Meta(max_length=MAX_KEYS)]


class KeptTurn(msgspec.Struct, frozen=True):
    """A turn: a finished request whose blocks its engine keeps for the next turn of the conversation.

    For prefixes shorter than `min_prefix_tokens`, KV is missing: windows have freed blocks, or state exists
    only at the end. `next_tokens` are those after the common chunks, at most `AskTurn.chunk_tokens`.
    """

    engine_id: EngineId
    ticket: Ticket
    grant: Grant
    min_prefix_tokens: Count = msgspec.field(name="least")
    chunks: Count  # leading ones that the turn and the query's prompt have in common
    next_tokens: Annotated[list[HalfWord], msgspec.Meta(max_length=1 << 20)] = msgspec.field(name="after")


class Turns(msgspec.Struct, frozen=True, tag="turns"):
    """Reply: the turns that share the most leading chunks with the prompt, the same number for all."""

    number: int
    kept: Annotated[list[KeptTurn], msgspec.Meta(max_length=MAX_TURNS)]


Request: TypeAlias = Hello | Redeem | Claim | AskTurn
Reply: TypeAlias = PeerInfo | Refused | Redeemed | Unchanged | NotRedeemed | Turns
# Replies that repeat the number of their request. All other replies belong to a handshake.
Numbered: TypeAlias = Redeemed | Unchanged | NotRedeemed | Turns

_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)
_numbered = msgspec.msgpack.Decoder(Numbered)


# Encodes a message of the control or gather channel as MessagePack.
encode: Callable[[msgspec.Struct], bytes] = msgspec.msgpack.Encoder().encode

# Text that is not UTF-8 raises a plain ValueError.
_UNREADABLE = (msgspec.DecodeError, GeometryError, ValueError, OverflowError, RecursionError)


@contextmanager
def as_protocol_error(what: str) -> Iterator[None]:
    """Raise errors in a peer's bytes as ProtocolError, with the text "not {what}: …"."""
    try:
        yield
    except _UNREADABLE as error:
        raise ProtocolError(f"not {what}: {shown(str(error), 500)}") from error


def decode_request(data: bytes) -> Request:
    """Decode a consumer's message. Raise ProtocolError if that fails, or a value is out of bounds."""
    with as_protocol_error(f"a request of protocol {PROTOCOL}"):
        message: Request = _requests.decode(data)
    return message


def decode_reply(data: bytes) -> Reply:
    """Decode a producer's reply and check its ranks. Raise ProtocolError if they are out of bounds."""
    with as_protocol_error(f"an answer of protocol {PROTOCOL}"):
        message: Reply = _replies.decode(data)
        if isinstance(message, PeerInfo):
            check_ranks(message.ranks)
    return message


def decode_numbered(data: bytes) -> Numbered | None:
    """Decode a reply that repeats the number of its request; None for anything else."""
    try:
        answer: Numbered = _numbered.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    return answer


def compare_facts(theirs: Mapping[str, Fact], ours: Mapping[str, Fact]) -> list[str]:
    """Compare the properties of two engines, and return one sentence per difference.

    A property that only one side has is no difference. A property may be a group of settings: in it, a
    setting that only one side has is a difference. Of these, `MAX_NAMED` get a sentence each, and one counts
    the rest.

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


def differences(theirs: Hello, ours: Hello) -> list[str]:
    """Return why one engine cannot read KV from another, given what each would ask the other with."""
    if theirs.protocol != ours.protocol:
        return [
            f"protocol {theirs.protocol} there, {ours.protocol} here; run the same release of kvferry on both"
        ]
    return compare_facts(theirs.facts.must_agree, ours.facts.must_agree)


def make_refusal(differences: Sequence[str]) -> Refused:
    """Return a refusal that names these differences, cut to the message's limits."""
    said = [shown(text, MAX_SENTENCE) for text in differences[: MAX_DIFFERENCES - 1]]
    if more := len(differences) - len(said):
        said.append(f"{more} more differences")
    return Refused(said)


def _settings(name: str, theirs: dict[str, str], ours: dict[str, str]) -> Iterator[str]:
    # Sorted, so that both engines' logs name the same settings.
    keys = [key for key in sorted(theirs.keys() | ours.keys()) if theirs.get(key) != ours.get(key)]
    for key in keys[:MAX_NAMED]:
        yield f"{name}: {key} is {theirs.get(key, 'not set')} there, {ours.get(key, 'not set')} here"
    if len(keys) > MAX_NAMED:
        yield f"{name}: {len(keys) - MAX_NAMED} more settings differ"


def _said(fact: Fact) -> str:
    return f"{len(fact)} settings" if isinstance(fact, dict) else fact


def check_ranks(cards: Sequence[RankCard]) -> None:
    """Raise ProtocolError or GeometryError if ranks are out of bounds or do not form one engine."""
    for card in cards:
        for what, count, most in _sizes(card.geometry):
            if count > most:
                raise ProtocolError(f"{count} {what}, at most {most}")
    # Only now are the geometries small enough to be looked at closely.
    for card in cards:
        _check_words(card)
        for region in card.geometry.regions:
            _check_region(region)
        card.geometry.check()  # its time grows with the sizes, too
    _check_agreement([card.geometry for card in cards])


def _sizes(rank: RankGeometry) -> Iterator[tuple[str, int, int]]:
    """Yield (name, size, limit) for every size in a rank's geometry that has a limit."""
    yield "groups of a rank", len(rank.groups), MAX_GROUPS
    yield "layers of a rank", sum(len(group.layers) for group in rank.groups), MAX_LAYERS
    yield "regions of a rank", len(rank.regions), MAX_REGIONS
    for group in rank.groups:
        for layer in group.layers:
            yield from _sizes_of_layer(layer)


def _sizes_of_layer(layer: Layer) -> Iterator[tuple[str, int, int]]:
    names = (layer.name, layer.draft, layer.page.content)
    yield "characters of a name", max(map(len, names)), MAX_NAME
    yield "scales of a layer", len(layer.scales), MAX_FIELDS
    for scale in layer.scales:
        yield "characters of a scale's source", len(scale.source), MAX_NAME
        yield "factors of a scale", len(scale.factors), MAX_FACTORS
    yield "ranks that divide the tokens of a block", layer.page.interleave.ranks, MAX_RANKS
    yield "fields of a page", len(layer.page.fields), MAX_FIELDS
    for field in layer.page.fields:
        yield "characters of a field's name", len(field.name), MAX_NAME
        yield "axes of a field", len(field.axes), MAX_AXES
        for axis in field.axes:
            yield "characters of an axis' name", len(axis.name), MAX_NAME
            yield "loops of an axis", len(axis.loops), MAX_LOOPS


def _check_region(region: Region) -> None:
    if region.memory not in _MEMORIES:
        raise ProtocolError(f"memory of kind {shown(region.memory)}, expected {' or '.join(_MEMORIES)}")
    if region.address < 0 or region.length < 1 or region.address + region.length > _ADDRESSES:
        raise ProtocolError(
            f"a region of {region.length} bytes at address {region.address}, expected one within 63 bits"
        )
    if not 0 <= region.device < 1 << 16:
        raise ProtocolError(f"a region on device {region.device}, expected 0 to 65535")


def _check_words(card: RankCard) -> None:
    if card.leases < 1:
        raise ProtocolError(
            f"a rank with {card.words} words, none of them a lease word; expected one or more"
        )
    if card.words_address + 8 * card.words > _ADDRESSES:
        raise ProtocolError(
            f"{card.words} words at address {card.words_address}, expected them within 63 bits"
        )


def _check_agreement(ranks: Sequence[RankGeometry]) -> None:
    if not ranks:  # the handshake refuses that
        return
    first = ranks[0]
    sizes = {(rank.pp_size, rank.tp_size) for rank in ranks}
    places = {(rank.pp_rank, rank.tp_rank) for rank in ranks}
    expected = first.pp_size * first.tp_size
    if len(sizes) > 1 or len(places) < len(ranks) or len(ranks) != expected:
        raise ProtocolError(
            f"{len(ranks)} ranks with {len(places)} different indices, parallel sizes (pp, tp) "
            f"{sorted(sizes)[:4]}; "
            f"expected {expected} ranks of one size, each with its own index"
        )
    groups = {
        tuple((one.kind, one.block_tokens, one.attention_span) for one in rank.groups) for rank in ranks
    }
    if len(groups) > 1:
        raise ProtocolError("the peer's ranks have different KV cache groups; all must have the same")
