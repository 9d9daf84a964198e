"""What happens to requests, as values: said once, where it is decided, in the order in which it happens.

One request, told in full (what is in brackets may be missing or come again):

    Arrived ─▶ [Asked …] ─▶ [LoadBegan ─▶ LoadEnded [─▶ Refused ─▶ Asked …]] ─▶ Settled ─▶ … ─▶ Finished
                               twice, beside each other, where a prefix comes in two parts
                               [StoreBegan ─▶ StoreEnded] at any time from then on
                               preempted: Asked, LoadBegan, … and Settled once more

A producer's requests have LeaseGranted ─▶ [LeaseExtended …] ─▶ LeaseEnded after that. Loads and stores may
end after the request has. Times are seconds of the monotonic clock.

*Source* is ``peer`` or ``tiers``, what bids for requests; *tier* is where tokens rest: ``peer``, ``host``,
``file``, ``object``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

from kvferry.cache.bids import Bid, Part
from kvferry.terminal import shown

LONGEST_ID = 256
"""Characters of a request's id in an event; of a longer one the middle is left out."""


class Miss(StrEnum):
    """Why a source brought a request nothing. What cannot be told from what is said to be NOT_STORED."""

    NOT_STORED = "not_stored"  # it was never kept, or so long ago that nobody remembers
    EVICTED = "evicted"  # it was kept lately, and had to make room
    STORING = "storing"  # it is being stored just now
    SHORT_PROMPT = "short_prompt"  # the prompt is shorter than a chunk
    LOCAL = "local"  # the engine's own prefix cache has all that could be brought
    OTHER_NAMESPACE = "other_namespace"  # the tiers hold a model of this name, but not this one
    UNNAMED = "unnamed"  # the prompt's content has no certain name
    REFUSED = "refused"  # the offer or the peer cannot be used
    SKIPPED = "skipped"  # the request reads no cache, as for logprobs of its prompt
    LOOKING = "looking"  # it could not say in time what it has
    LOST_BID = "lost_bid"  # another source, or computing, was better
    BUSY = "busy"  # too many loads were under way
    NO_ROOM = "no_room"  # the engine had no blocks for a load and what comes after it
    ATTEMPTS = "attempts"  # loads of other sources failed so often that it was not tried any more
    CHECKSUM = "checksum"  # what was read is damaged
    DEADLINE = "deadline"  # a load took longer than load_timeout_seconds
    FAILED = "failed"  # a load failed otherwise


class Why(StrEnum):
    """Why a bid was taken, or none."""

    BEST = "the best bid"
    LOOKING = "a source that is still looking may have more"
    NOTHING = "no source has more"
    COMPUTING = "computing is better"
    SKIPPED = "it reads no cache"
    NO_ROOM = "the engine has no blocks for a load and what comes after it"
    ATTEMPTS = "no attempt is left"


class Outcome(StrEnum):
    """How a load ended."""

    READY = "ready"
    FAILED = "failed"
    EXPIRED = "expired"  # at its deadline; what it wrote to may be written still
    DROPPED = "dropped"  # the request ended before, or another part of its prefix failed


@dataclass(frozen=True, slots=True)
class Lack:
    """Why a source bids nothing.

    Attributes:
        source: its name.
        miss: in a word.
        group: number and kind of the KV cache group that lacks a chunk, ``several`` where more do, empty
            where it is no matter of groups.
        detail: for people.
    """

    source: str
    miss: Miss
    group: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Valued:
    """A bid, and what it was worth.

    Attributes:
        source: name of the source; the bid has the peer's.
        bid: with its parts, and whether it is looking.
        value: the policy's; 0 of one that may not be taken.
        struck: why it may not be taken, empty if it may.
    """

    source: str
    bid: Bid
    value: float
    struck: str = ""


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes of a KV cache group, over all ranks.

    Attributes:
        group: number and kind.
        strategy: how they travelled.
        size: bytes.
    """

    group: str
    strategy: str
    size: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request has come in.

    Attributes:
        tokens: of its prompt.
        sources: that may serve it.
        declined: sources that cannot, though they were asked.
        trace_headers: the trace that it belongs to, as W3C headers; none if it belongs to none.
    """

    request_id: str
    at: float
    tokens: int
    sources: tuple[str, ...]
    declined: tuple[Lack, ...] = ()
    trace_headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Asked:
    """At admission, sources were asked. Said again only when something of it has changed.

    Attributes:
        have: tokens that the engine's own prefix cache has.
        bids: all that were made, in the order of their sources.
        computing: the policy's value of computing everything.
        lacks: of sources that bid nothing.
        chosen: the bid, which is waited for if it is looking; None to compute.
        why: so.
    """

    request_id: str
    at: float
    have: int
    bids: tuple[Valued, ...]
    computing: float
    lacks: tuple[Lack, ...]
    chosen: Bid | None
    why: Why


@dataclass(frozen=True, slots=True)
class LoadBegan:
    """A bid was taken and the engine has blocks for it.

    Attributes:
        load: names it.
        source: name of the source.
        peer: name of the bidder: the source's, or the peer's.
        parts: where the tokens come from, as they were bid.
        have, total: it brings the tokens from one to the other.
        attempt: what the request waits for: this load, or this and that of another part.
    """

    request_id: str
    at: float
    load: str
    source: str
    peer: str
    parts: tuple[Part, ...]
    have: int
    total: int
    attempt: str


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """All ranks have reported a load; one that is late may still write to its blocks.

    Attributes:
        load, source: as of `LoadBegan`.
        outcome: in a word.
        miss: what kind of failure; None if it did not fail.
        failure: for people.
        seconds: since it began.
        moved: bytes that were brought; nothing of a load that failed.
        pages, descriptors: prepared descriptors, and what was left of them merged.
        plan_seconds, transfer_seconds, check_seconds: of the slowest rank; 0 of tiers.
    """

    request_id: str
    at: float
    load: str
    source: str
    outcome: Outcome
    miss: Miss | None
    failure: str
    seconds: float
    moved: tuple[Moved, ...] = ()
    pages: int = 0
    descriptors: int = 0
    plan_seconds: float = 0.0
    transfer_seconds: float = 0.0
    check_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Refused:
    """A source is not asked any more for this request.

    Attributes:
        source: whom: a peer's name, or what is to blame.
        reason: for people.
    """

    request_id: str
    at: float
    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class Settled:
    """The engine goes on with a request, and computes what is not there.

    Attributes:
        at_hand: tokens that need not be computed.
        tokens: of the request.
        elsewhere: of those at hand, what another connector of this engine has brought.
    """

    request_id: str
    at: float
    at_hand: int
    tokens: int
    elsewhere: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The request has ended, whichever way."""

    request_id: str
    at: float


@dataclass(frozen=True, slots=True)
class StoreBegan:
    """Ranks were told to copy chunks to host memory.

    Attributes:
        store: names the order.
        group: number and kind of the KV cache group.
        chunks: how many.
    """

    request_id: str
    at: float
    store: str
    group: str
    chunks: int


@dataclass(frozen=True, slots=True)
class StoreEnded:
    """All ranks have.

    Attributes:
        store: as of `StoreBegan`.
        failure: why they could not; empty if they could.
        size: bytes, over all ranks.
        seconds: of the slowest rank.
    """

    request_id: str
    at: float
    store: str
    failure: str
    size: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """A producer keeps the blocks of a prompt for a consumer, or of a whole request for its next turn.

    Attributes:
        tokens: offered.
        seconds: until it ends, unless the consumer is heard of.
        turn: for the next turn, whoever asks.
    """

    request_id: str
    at: float
    tokens: int
    seconds: float
    turn: bool = False


@dataclass(frozen=True, slots=True)
class LeaseExtended:
    """Its consumer was heard of."""

    request_id: str
    at: float


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """Its consumer needs it no more, or was silent for too long; or the producer has withdrawn it.

    Attributes:
        expired: its consumer was silent.
        withdrawn: the cache was reset, or the request was aborted after one of its samples had ended.
    """

    request_id: str
    at: float
    expired: bool
    withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class TierTold:
    """What has changed of a tier since it was last told of: no matter of one request.

    Attributes:
        tier: its name.
        used, capacity: bytes, None where that is not known.
        owed: chunks that wait to be written to it, None of host memory.
        fetched, stored, stored_bytes, evicted: chunks more, and bytes.
        missed, dropped: chunks more, by reason.
        fetch_seconds, store_seconds: of every chunk that its threads have read or written.
    """

    at: float
    tier: str
    used: int | None = None
    capacity: int | None = None
    owed: int | None = None
    fetched: int = 0
    stored: int = 0
    stored_bytes: int = 0
    evicted: int = 0
    missed: tuple[tuple[str, int], ...] = ()
    dropped: tuple[tuple[str, int], ...] = ()
    fetch_seconds: tuple[float, ...] = ()
    store_seconds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LateBlocks:
    """How many blocks loads still hold whose deadline has passed or whose request has ended has changed."""

    at: float
    blocks: int


OfRequest: TypeAlias = (
    Arrived
    | Asked
    | LoadBegan
    | LoadEnded
    | Refused
    | Settled
    | Finished
    | StoreBegan
    | StoreEnded
    | LeaseGranted
    | LeaseExtended
    | LeaseEnded
)
Event: TypeAlias = OfRequest | TierTold | LateBlocks


def brief(event: Event) -> Event:
    """Return the event with the request's id cut to a bounded length: clients choose ids of any length."""
    if isinstance(event, TierTold | LateBlocks) or len(event.request_id) <= LONGEST_ID:
        return event
    return replace(event, request_id=shown(event.request_id, LONGEST_ID))
