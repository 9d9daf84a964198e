"""Messages that redeem a ticket: exchange it, with digests of the prompt, for block tables and a lease.

    consumer                                  producer
    Redeem(ticket, digests of its prompt) ──▶ looks the ticket up, and compares its own digests
                                          ◀── Redeemed(grant, tokens) | Unchanged | NotRedeemed(reason)

The producer may still be computing the prompt. The reply then covers the first tokens of the prompt, and the
consumer repeats its request until the reply covers all of them.

The ticket passes through clients. It is useless without a prompt of the same content. The grant leaves the
channel between the two engines only sealed (`transport.seal`).
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, TypeAlias

import msgspec
import numpy as np

from kvferry.common.units import counted
from kvferry.planning.descriptors import Int64s
from kvferry.transport.lease import LeaseWord

TICKET_BYTES = 16
MAX_TOKENS = 1 << 31
MAX_ADAPTER = 4096
MAX_REASON = 2048
MAX_GROUPS = 1024
# Maximum number of blocks in a grant. The limit bounds the lists that the engine's thread builds.
MAX_BLOCKS = 1 << 22
# Maximum number of consumers of a ticket, because a client with the key can invent consumers.
MAX_CONSUMERS: Final = 256

UNKNOWN: Final = (
    "it does not know the ticket: its lease has ended (released, or not claimed within lease_seconds), or "
    "the ticket is not of this engine"
)
RELEASED: Final = "this engine has redeemed the ticket before, and released it"
CROWDED: Final = f"{MAX_CONSUMERS} engines have redeemed the ticket, and no more may"

# A random id that names a lease in messages and cannot be guessed.
Ticket: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=TICKET_BYTES, max_length=TICKET_BYTES)]

_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
# A half of a lease word: the incarnation, a random number that identifies one run of an engine, or a counter.
HalfWord: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]

_ID: Final = np.dtype("<u4")
_Tokens = Annotated[int, msgspec.Meta(ge=1, lt=MAX_TOKENS)]
_Digest = Annotated[str, msgspec.Meta(max_length=32)]


def new_ticket() -> bytes:
    """Return a new random ticket of 128 bits."""
    return secrets.token_bytes(TICKET_BYTES)


class PromptContent(msgspec.Struct, frozen=True):
    """Digests of all that the KV of a prompt's prefix depends on; empty for what the prompt lacks."""

    tokens: _Digest
    items: _Digest = ""  # images, videos and audio with their positions
    adapter: Annotated[str, msgspec.Meta(max_length=MAX_ADAPTER)] = ""  # identifies the LoRA by content
    salt: _Digest = ""  # separates tenants

    def difference(self, offered: PromptContent) -> str | None:
        """Return why the blocks of a producer's prompt do not fit this prompt; None if they fit."""
        if offered.tokens != self.tokens:
            return (
                "the offered blocks hold other tokens than this prompt; do both engines use the same "
                "tokenizer and chat template, and does the router pair the right halves?"
            )
        if offered.items != self.items:
            return (
                "the offered blocks hold other images (or video, or audio) than this prompt, as the "
                "processors made them; do both engines get the same media, and have the same "
                "preprocessor_config.json and --mm-processor-kwargs?"
            )
        if offered.adapter != self.adapter:
            return (
                f"the offered blocks were computed with LoRA {offered.adapter[:256] or 'none'}, this prompt "
                f"has {self.adapter[:256] or 'none'} (digests of weights and configuration, then the "
                "engine's LoRA settings); give both engines the same adapter files under this name"
            )
        if offered.salt != self.salt:
            return (
                "the offered blocks belong to another cache_salt than this prompt's; a router must send "
                "the same cache_salt to both engines"
            )
        return None


class Grant(msgspec.Struct, frozen=True):
    """Permission to read a producer's blocks: block tables, and the word of the lease that protects them.

    Attributes:
        incarnation, slot, generation: as in `LeaseWord`.
        tokens: number of tokens whose KV the blocks hold, from the start of the prompt.
        tables: block ids of each KV cache group in the order of the tokens, packed as uint32. While the
            producer computes the prompt, those of groups that do not attend to all tokens are empty.
    """

    incarnation: HalfWord
    slot: Count
    generation: HalfWord
    tokens: _Tokens
    tables: Annotated[list[bytes], msgspec.Meta(max_length=MAX_GROUPS)]

    # A list of thousands of numbers is slow to decode, so ids are packed and checked here.
    def __post_init__(self) -> None:
        blocks = 0
        for table in self.tables:
            if len(table) % _ID.itemsize:
                raise ValueError(f"block ids take {_ID.itemsize} bytes each")
            blocks += len(table) // _ID.itemsize
        if blocks > MAX_BLOCKS:
            raise ValueError(f"block tables of {blocks} blocks, at most {MAX_BLOCKS}")

    @classmethod
    def of(cls, word: LeaseWord, tokens: int, tables: Iterable[Sequence[int]]) -> Grant:
        """Create a grant from the block ids of each KV cache group, in the order of the tokens.

        Id 0 marks a block that the producer no longer holds. A group of recurrent state has one block: the
        state at the end.
        """
        packed = [np.asarray(table, _ID).tobytes() for table in tables]
        return cls(word.incarnation, word.slot, word.generation, tokens, packed)

    @property
    def block_ids(self) -> tuple[Int64s, ...]:
        return tuple(np.frombuffer(table, _ID).astype(np.int64) for table in self.tables)

    @property
    def word(self) -> LeaseWord:
        return LeaseWord(self.slot, self.generation, self.incarnation)


class Redeem(msgspec.Struct, frozen=True, tag="redeem"):
    """Request: exchanges a ticket for a grant and a claim on the lease."""

    number: _Number
    consumer: HalfWord
    ticket: Ticket
    tokens: _Tokens  # whose KV was offered
    content: PromptContent  # digests of as many tokens of the consumer's prompt
    known_tokens: Count = 0  # that the last reply covered; 0 in the first request


class Redeemed(msgspec.Struct, frozen=True, tag="redeemed"):
    """Reply: the consumer has claimed the lease, and may read while it is valid."""

    number: _Number
    grant: Grant
    cached_tokens: Count | None = None  # in the producer's caches; None if unknown, or in its offer


class Unchanged(msgspec.Struct, frozen=True, tag="unchanged"):
    """Reply: the ticket is accepted, but its blocks hold no more tokens than the consumer knows of."""

    number: _Number


class NotRedeemed(msgspec.Struct, frozen=True, tag="not-redeemed"):
    """Reply: the ticket is not accepted. The producer's state is unchanged. It may not know the ticket."""

    number: _Number
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON)]
    unknown: bool = False


@dataclass(slots=True)
class _OpenTicket:
    """A ticket whose lease has not ended, with the incarnations that `claimed` it, or have `released` it."""

    lease: str
    tokens: int
    content: PromptContent
    grant: Grant
    cached_tokens: int | None
    claimed: set[int] = field(default_factory=set)
    released: set[int] = field(default_factory=set)

    def refusal(self, asked: Redeem) -> str | None:
        if asked.tokens != self.tokens:
            return f"the ticket is for {counted(self.tokens, 'token')}, not for {asked.tokens}"
        if (reason := asked.content.difference(self.content)) is not None:
            return reason
        if asked.consumer in self.released:
            return RELEASED
        # Those that released it count, too: the sets must not grow without bound.
        crowded = len(self.claimed | self.released) >= MAX_CONSUMERS and asked.consumer not in self.claimed
        return CROWDED if crowded else None


class TicketBook:
    """The tickets of a producer, and the consumers that have redeemed them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[bytes, _OpenTicket] = {}
        self._tickets: dict[str, bytes] = {}  # ticket by lease, until it is withdrawn

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, ticket: bytes) -> bool:
        return ticket in self._open

    # -- the engine's thread ------------------------------------------------------------------------------

    def publish(
        self,
        ticket: bytes,
        lease: str,
        tokens: int,
        content: PromptContent,
        grant: Grant,
        *,
        cached_tokens: int | None = None,
    ) -> None:
        """Add a ticket, which consumers can redeem from now on.

        Args:
            tokens, content: number of tokens whose KV the leased blocks hold in the end, and digests of them.
            grant: may have fewer tokens, until `advance`.
            cached_tokens: number of prompt tokens that this engine's caches had; None if the offer says it.
        """
        with self._lock:
            if ticket in self._open:
                raise ValueError("the ticket names another lease already")
            self._open[ticket] = _OpenTicket(lease, tokens, content, grant, cached_tokens)
            self._tickets[lease] = ticket

    def advance(self, lease: str, grant: Grant) -> None:
        """Record that blocks hold the KV of more tokens. Ignore a lease without a ticket."""
        with self._lock:
            if (found := self._open.get(self._tickets.get(lease, b""))) is not None:
                found.grant = grant

    def withdraw(self, leases: Iterable[str]) -> None:
        with self._lock:
            for lease in leases:
                self._open.pop(self._tickets.pop(lease, b""), None)

    # -- the thread of the control channel ----------------------------------------------------------------

    def redeem(self, asked: Redeem) -> Redeemed | Unchanged | NotRedeemed:
        with self._lock:
            if (found := self._open.get(asked.ticket)) is None:
                return NotRedeemed(asked.number, UNKNOWN, unknown=True)
            if (reason := found.refusal(asked)) is not None:
                return NotRedeemed(asked.number, reason)
            # A consumer may repeat its request, because the first reply was lost: it gets the reply again.
            found.claimed.add(asked.consumer)
            if found.grant.tokens <= asked.known_tokens:
                return Unchanged(asked.number)
            return Redeemed(asked.number, found.grant, found.cached_tokens)

    def claimed(self, consumer: int, tickets: Iterable[bytes]) -> list[str]:
        """Return the names of those leases that the consumer has claimed and not released."""
        with self._lock:
            found = [self._open[ticket] for ticket in dict.fromkeys(tickets) if ticket in self._open]
            return [one.lease for one in found if consumer in one.claimed]

    def release(self, consumer: int, tickets: Iterable[bytes]) -> list[str]:
        """End a consumer's claims, and return the leases that nobody claims any more, to be ended."""
        leases = []
        with self._lock:
            for ticket in tickets:
                if (found := self._open.get(ticket)) is None or consumer not in found.claimed:
                    continue
                found.claimed.discard(consumer)
                found.released.add(consumer)
                if not found.claimed:
                    # Another lease may get the same ticket before this one is withdrawn.
                    self._tickets.pop(found.lease, None)
                    del self._open[ticket]
                    leases.append(found.lease)
        return leases
