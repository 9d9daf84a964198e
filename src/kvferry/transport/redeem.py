"""A ticket is redeemed: its 128 random bits and the digests of a prompt become block tables and a lease.

    consumer                                  producer
    Redeem(ticket, digests of its prompt) ──▶ looks the ticket up, and compares its own digests
                                          ◀── Redeemed(grant) | NotRedeemed(reason)

The ticket is all that passes through users. Without a prompt of the same content it is worth nothing, and
what it is exchanged for never leaves the channel between the two engines.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Annotated, Final, TypeAlias

import msgspec
import numpy as np

from kvferry.transport.lease import LeaseWord

TICKET_BYTES = 16
MAX_TOKENS = 1 << 31
MAX_ADAPTER = 4096
MAX_REASON = 2048
MAX_GROUPS = 1024
MAX_BLOCKS = 1 << 22
"""Of all block tables of a grant. The engine's thread lists them, so a peer must not make that long."""

Ticket: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=TICKET_BYTES, max_length=TICKET_BYTES)]
"""The name of a lease on the wire: random, so knowing one is having been given it."""

Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Incarnation: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
"""Which run of an engine."""

_ID: Final = np.dtype("<u4")
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Word = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Digest = Annotated[str, msgspec.Meta(max_length=32)]


def new_ticket() -> bytes:
    """Return a ticket that no other lease of any engine has."""
    return secrets.token_bytes(TICKET_BYTES)


class PromptContent(msgspec.Struct, frozen=True):
    """Digests of all that the KV of the beginning of a prompt was computed from.

    Attributes:
        tokens: of the token ids.
        items: of images, videos and audio with their positions; empty without any.
        adapter: the LoRA adapter's name by content; empty without one.
        salt: of the cache salt, which keeps tenants apart; empty without one.
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
    """What a pull reads from: blocks that a producer keeps, and the word that says whether it still does.

    Attributes:
        slot, generation: of the lease word.
        tables: `block_ids` as bytes, since thousands of numbers in a list take longer to read than to send.
    """

    slot: _Count
    generation: _Word
    tables: Annotated[list[bytes], msgspec.Meta(max_length=MAX_GROUPS)]

    def __post_init__(self) -> None:
        """Raise ValueError for tables that are cut short or too long."""
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
    def block_ids(self) -> tuple[list[int], ...]:
        """Block ids by position per group."""
        return tuple(np.frombuffer(table, _ID).tolist() for table in self.tables)

    def word(self, incarnation: int) -> LeaseWord:
        """Return the lease word, in that run of the producer."""
        return LeaseWord(self.slot, self.generation, incarnation)


class Redeem(msgspec.Struct, frozen=True, tag="redeem"):
    """Asks for the blocks of a ticket.

    Attributes:
        number: comes back with the answer.
        consumer: which run of which engine asks; its incarnation.
        ticket: 128 bits.
        tokens: number of tokens that the ticket came with.
        content: digests of the consumer's own prompt, of so many tokens.
    """

    number: Number
    consumer: Incarnation
    ticket: Ticket
    tokens: Annotated[int, msgspec.Meta(ge=1, lt=MAX_TOKENS)]
    content: PromptContent


class Redeemed(msgspec.Struct, frozen=True, tag="redeemed"):
    """The consumer has claimed the lease, and may read until it releases it.

    Attributes:
        number: of the question.
        incarnation: which run of the producer answers.
        grant: where the blocks are.
    """

    number: Number
    incarnation: Incarnation
    grant: Grant


class NotRedeemed(msgspec.Struct, frozen=True, tag="not-redeemed"):
    """Nothing is granted, and nothing has changed.

    Attributes:
        number: of the question.
        incarnation: which run of the producer answers.
        reason: a sentence.
    """

    number: Number
    incarnation: Incarnation
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON)]
