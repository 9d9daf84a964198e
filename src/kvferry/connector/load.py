"""A load as admission, the sources and the workers exchange it, and what it moved in which time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import LoadSpan


@dataclass(frozen=True, slots=True)
class PlaceTokens:
    """The number of tokens that a source offers to load from one place: ``peer``, or a tier."""

    place: str
    tokens: int


def trim_parts(parts: Iterable[PlaceTokens], tokens: int) -> tuple[PlaceTokens, ...]:
    """Return the places of the first `tokens` tokens of an offer, at most the sum of its parts.

    >>> trim_parts((PlaceTokens("host", 300), PlaceTokens("file", 200), PlaceTokens("object", 100)), 400)
    (PlaceTokens(place='host', tokens=300), PlaceTokens(place='file', tokens=100))
    """
    found = []
    for part in parts:
        taken = min(part.tokens, tokens)
        if taken > 0:
            found.append(PlaceTokens(part.place, taken))
        tokens -= taken
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Bid:
    """A source's offer to load KV of tokens that the engine does not have.

    Attributes:
        source: a peer's name, or ``tiers``.
        parts: number of offered tokens from each place, including the tokens of `head`.
        looking: True while the source is still looking up how much KV it has. The numbers in `parts` are then
            upper bounds.
        promised: True if the source is still looking, but the request came with a peer's ticket, which says
            the numbers in `parts`.
        head, tail: bids for the start and the rest of the prefix, if two sources load one prefix together:
            another source and `source`. None if `source` loads everything.
        growing: True if the place still computes some of the tokens. The time of the load then tells nothing
            about the speed of the place.
    """

    source: str
    parts: tuple[PlaceTokens, ...]
    looking: bool = False
    promised: bool = False
    head: Bid | None = None
    tail: Bid | None = None
    growing: bool = False

    @classmethod
    def composed(cls, head: Bid, tail: Bid) -> Bid:
        """Combine the bids of two sources for the two parts of a prefix."""
        looking = [bid for bid in (head, tail) if bid.looking]
        return cls(
            tail.source,
            head.parts + tail.parts,
            looking=bool(looking),
            promised=bool(looking) and all(bid.promised for bid in looking),
            head=head,
            tail=tail,
        )

    @property
    def tokens(self) -> int:
        tokens = 0
        for part in self.parts:
            tokens += part.tokens
        return tokens

    @property
    def places(self) -> frozenset[str]:
        return frozenset(part.place for part in self.parts)

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources that make this bid, that of the prompt's start first."""
        return (self.source,) if self.head is None else (*self.head.sources, self.source)

    @property
    def unanswered(self) -> frozenset[str]:
        """Names of the answers that this bid waits for; empty if its sources have answered."""
        if self.head is not None and self.tail is not None:
            return self.head.unanswered | self.tail.unanswered
        if not self.looking:
            return frozenset()
        # A peer that still computes the prompt answers much later, so its answers are timed apart.
        return frozenset((f"{self.source}, computing" if self.growing else self.source,))

    def has_same_sources(self, other: Bid | None) -> bool:
        """Return whether a bid has the same sources and places; False for None."""
        return other is not None and (self.sources, self.places) == (other.sources, other.places)


def saves_computation(missing_tokens: int) -> bool:
    """Return whether a load could save computing any of the tokens that are not in the prefix cache."""
    # The engine always computes the last token, to sample from it.
    return missing_tokens > 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Load:
    """A load of the KV of a prompt prefix, or of a part of a prefix, from one source.

    Attributes:
        key: name of the load, unique in this engine.
        attempt: name of the attempt to load the prefix, which has one load, or two that each load a part.
        loads: number of loads of the attempt.
        tables: destination block table of each KV cache group, int64, indexed by block position. The table of
            a recurrent state group has one entry, the block that receives the state snapshot.
        timeout_seconds: seconds from the time when a worker begins the load to its deadline.
        began: monotonic seconds in the scheduler's process.
    """

    key: str
    request_id: str
    attempt: str
    loads: int
    bid: Bid
    span: LoadSpan
    tables: tuple[Int64s, ...]
    timeout_seconds: float
    began: float

    @property
    def source(self) -> str:
        """Name of the source: the peer's name, or ``tiers``."""
        return self.bid.source


class LoadOutcome(StrEnum):
    """The outcome of a load."""

    READY = "ready"
    FAILED = "failed"
    EXPIRED = "expired"  # failed in flight, mostly at its deadline; late writes may still land in its blocks
    DROPPED = "dropped"  # the request ended first, or another part of its prefix failed


@dataclass(frozen=True, slots=True)
class GroupBytes:
    """The bytes that a load moved for one KV cache group, summed over all ranks.

    Attributes:
        group: number and kind of the group, such as ``0 full_attention``.
        strategy: name of the transfer strategy; ``copied`` for a load from tiers.
        size: bytes.
    """

    group: str
    strategy: str
    size: int
