"""Messages that exchange a ticket and a prompt's digests for block tables and a lease.

    consumer                                  producer
    Redeem(ticket, digests of its prompt) ──▶ looks the ticket up, and compares its own digests
                                          ◀── Redeemed(grant) | NotRedeemed(reason)

A ticket is 128 random bits, and all that passes through clients. It is useless without a prompt of the same
content, and the grant never leaves the channel between the two engines.
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
MAX_BLOCKS = 1 << 22
"""Maximum number of blocks in a grant, because the engine's thread builds lists of them."""

Ticket: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=TICKET_BYTES, max_length=TICKET_BYTES)]
"""The name of a lease on the wire: random bits, which cannot be guessed."""

Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Incarnation: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
"""Random number of one run of an engine."""

_ID: Final = np.dtype("<u4")
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Word = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Digest = Annotated[str, msgspec.Meta(max_length=32)]


def new_ticket() -> bytes:
    """Return a ticket that no other lease of any engine has."""
    return secrets.token_bytes(TICKET_BYTES)


class PromptContent(msgspec.Struct, frozen=True):
    """Digests of all inputs from which the KV of a prompt's prefix was computed.

    Attributes:
        tokens: digest of the token ids.
        items: digest of images, videos and audio with their positions; empty without any.
        adapter: the LoRA adapter's name by content; empty without one.
        salt: digest of the cache salt, which separates tenants; empty without one.
    """

    tokens: _Digest
    items: _Digest = ""
    adapter: Annotated[str, msgspec.Meta(max_length=MAX_ADAPTER)] = ""
    salt: _Digest = ""

    def difference(self, offered: PromptContent) -> str | None:
        """Return why blocks of `offered` are not of this prompt; None if they are."""
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
    """Permission to read: the blocks that a producer keeps, and the lease word that protects them.

    Attributes:
        slot, generation: the lease word.
        tables: `block_ids` as bytes, since thousands of numbers in a list take longer to read than to send.
    """

    slot: _Count
    generation: _Word
    tables: Annotated[list[bytes], msgspec.Meta(max_length=MAX_GROUPS)]

    def __post_init__(self) -> None:
        """Raise ValueError for tables that are truncated or too long."""
        if any(len(table) % _ID.itemsize for table in self.tables):
            raise ValueError(f"block ids take {_ID.itemsize} bytes each")
        if (blocks := sum(map(len, self.tables)) // _ID.itemsize) > MAX_BLOCKS:
            raise ValueError(f"block tables of {blocks} blocks, at most {MAX_BLOCKS}")

    @classmethod
    def of(cls, slot: int, generation: int, tables: Iterable[Sequence[int]]) -> Grant:
        """Return a grant of these block ids by position per group.

        0 stands where the producer no longer holds a block. A state group has one block, with the snapshot.
        """
        return cls(slot, generation, [np.asarray(table, _ID).tobytes() for table in tables])

    @property
    def block_ids(self) -> tuple[Int64s, ...]:
        """Block ids by position per group, int64 arrays."""
        return tuple(np.frombuffer(table, _ID).astype(np.int64) for table in self.tables)

    def word(self, incarnation: int) -> LeaseWord:
        """Return the lease word, given the producer's incarnation."""
        return LeaseWord(self.slot, self.generation, incarnation)


class Redeem(msgspec.Struct, frozen=True, tag="redeem"):
    """Asks for the grant of a ticket.

    Attributes:
        number: number of the request, echoed in the reply.
        consumer: incarnation of the consumer.
        ticket: 128 bits.
        tokens: number of tokens in the offer.
        content: digests of the first `tokens` tokens of the consumer's own prompt.
    """

    number: Number
    consumer: Incarnation
    ticket: Ticket
    tokens: Annotated[int, msgspec.Meta(ge=1, lt=MAX_TOKENS)]
    content: PromptContent


class Redeemed(msgspec.Struct, frozen=True, tag="redeemed"):
    """Reply: the consumer has claimed the lease, and may read until it releases it.

    Attributes:
        number: of the question.
        incarnation: which run of the producer answers.
        grant: the blocks and the lease word.
    """

    number: Number
    incarnation: Incarnation
    grant: Grant


class NotRedeemed(msgspec.Struct, frozen=True, tag="not-redeemed"):
    """Reply: nothing is granted, and nothing has changed.

    Attributes:
        number: of the question.
        incarnation: which run of the producer answers.
        reason: the reason, as a sentence.
    """

    number: Number
    incarnation: Incarnation
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON)]
