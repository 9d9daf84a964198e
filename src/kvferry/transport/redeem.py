"""Messages that redeem a ticket: exchange it, with digests of the prompt, for block tables and a lease.

    consumer                                  producer
    Redeem(ticket, digests of its prompt) ──▶ looks the ticket up, and compares its own digests
                                          ◀── Redeemed(grant, tokens) | Unchanged | NotRedeemed(reason)

The producer may still be computing the prompt. The reply then covers the first tokens of the prompt, and the
consumer repeats its request until the reply covers all of them.

Only the ticket passes through clients. It is useless without a prompt of the same content. The grant never
leaves the channel between the two engines.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Annotated, Final, TypeAlias

import msgspec
import numpy as np

from kvferry.planning.descriptors import Int64s
from kvferry.transport.lease import LeaseWord

TICKET_BYTES = 16
MAX_TOKENS = 1 << 31
MAX_ADAPTER = 4096
MAX_REASON = 2048
MAX_GROUPS = 1024
# Maximum number of blocks in a grant. The limit bounds the lists that the engine's thread builds.
MAX_BLOCKS = 1 << 22

# A random id that names a lease in messages and cannot be guessed.
Ticket: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=TICKET_BYTES, max_length=TICKET_BYTES)]

Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
# A random number that identifies one run of an engine.
Incarnation: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]

_ID: Final = np.dtype("<u4")
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Word = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Digest = Annotated[str, msgspec.Meta(max_length=32)]


def new_ticket() -> bytes:
    """Return a new random ticket of 128 bits."""
    return secrets.token_bytes(TICKET_BYTES)


class PromptContent(msgspec.Struct, frozen=True):
    """Digests of everything on which the KV of a prompt's prefix depends; empty for what the prompt has not.

    Attributes:
        items: images, videos and audio with their positions.
        adapter: identifies the LoRA adapter by content.
        salt: separates tenants.
    """

    tokens: _Digest
    items: _Digest = ""
    adapter: Annotated[str, msgspec.Meta(max_length=MAX_ADAPTER)] = ""
    salt: _Digest = ""

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
        slot: index of the lease's word on every worker.
        generation: low half of the word while the lease is valid.
        tables: block ids of each KV cache group in the order of the tokens, packed as uint32.
    """

    slot: _Count
    generation: _Word
    tables: Annotated[list[bytes], msgspec.Meta(max_length=MAX_GROUPS)]

    # A list of thousands of numbers is slow to decode, so ids are packed and checked here.
    def __post_init__(self) -> None:
        if any(len(table) % _ID.itemsize for table in self.tables):
            raise ValueError(f"block ids take {_ID.itemsize} bytes each")
        if (blocks := sum(map(len, self.tables)) // _ID.itemsize) > MAX_BLOCKS:
            raise ValueError(f"block tables of {blocks} blocks, at most {MAX_BLOCKS}")

    @classmethod
    def of(cls, slot: int, generation: int, tables: Iterable[Sequence[int]]) -> Grant:
        """Create a grant from lists of block ids.

        Args:
            tables: block ids of each KV cache group, in the order of the tokens. Id 0 marks a block that the
                producer no longer holds. A group of recurrent state has one block: the state at the end.
        """
        return cls(slot, generation, [np.asarray(table, _ID).tobytes() for table in tables])

    @property
    def block_ids(self) -> tuple[Int64s, ...]:
        return tuple(np.frombuffer(table, _ID).astype(np.int64) for table in self.tables)

    def word(self, incarnation: int) -> LeaseWord:
        """Return the word of the lease, given the incarnation in the reply that contains this grant."""
        return LeaseWord(self.slot, self.generation, incarnation)


class Redeem(msgspec.Struct, frozen=True, tag="redeem"):
    """Request: exchanges a ticket for a grant and a claim on the lease.

    Attributes:
        tokens, content: number of tokens whose KV was offered, and digests of as many of the consumer's
            prompt.
        known_tokens: number of tokens that the last reply covered; 0 in the first request.
    """

    number: Number
    consumer: Incarnation
    ticket: Ticket
    tokens: Annotated[int, msgspec.Meta(ge=1, lt=MAX_TOKENS)]
    content: PromptContent
    known_tokens: Annotated[int, msgspec.Meta(ge=0, lt=MAX_TOKENS)] = 0


class Redeemed(msgspec.Struct, frozen=True, tag="redeemed"):
    """Reply: the consumer has claimed the lease, and may read while it is valid.

    Attributes:
        grant: while the producer computes the prompt, the tables of groups that do not attend to all tokens
            are empty.
        tokens: number of tokens whose KV the blocks hold, from the start of the prompt.
        cached_tokens: number of prompt tokens that the producer's caches had. None if it does not know, or if
            its offer says it.
    """

    number: Number
    incarnation: Incarnation
    grant: Grant
    tokens: Annotated[int, msgspec.Meta(ge=1, lt=MAX_TOKENS)]
    cached_tokens: Annotated[int, msgspec.Meta(ge=0, lt=MAX_TOKENS)] | None = None


class Unchanged(msgspec.Struct, frozen=True, tag="unchanged"):
    """Reply: the ticket is accepted, but its blocks hold no more tokens than the consumer knows of."""

    number: Number
    incarnation: Incarnation


class NotRedeemed(msgspec.Struct, frozen=True, tag="not-redeemed"):
    """Reply: the ticket is not accepted. The producer's state is unchanged.

    Attributes:
        unknown: True if the producer does not know the ticket.
    """

    number: Number
    incarnation: Incarnation
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON)]
    unknown: bool = False
