"""Events of requests and tiers, emitted where the decision is made, in the order in which they happen.

All events of one request (those in brackets may be missing or repeat):

    Arrived ─▶ [SourcesAsked …] ─▶ [LoadBegan ─▶ LoadEnded [─▶ SourceRefused ─▶ SourcesAsked …]] ─▶ Scheduled
    ─▶ … ─▶ Finished

A prefix that comes from two sources has two loads at a time. StoreBegan ─▶ StoreEnded may come at any time
after Scheduled. A preempted request has SourcesAsked, LoadBegan, … and Scheduled once more. A producer's
requests then have LeaseGranted ─▶ [LeaseExtended …] ─▶ LeaseEnded. Loads and stores may end after their
request.

A *source* bids for requests: ``peer`` or ``tiers``. A *tier* holds tokens: ``peer``, ``host``, ``file``,
``object``. ``at`` is the time of an event in seconds of the monotonic clock.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from enum import StrEnum
from typing import TypeAlias

from kvferry.connector.bids import Bid, Part
from kvferry.connector.load_figures import NO_FIGURES, LoadFigures
from kvferry.terminal import shown

MAX_ID_CHARACTERS = 256
"""Longest request id in an event; the middle of a longer one is left out."""


class MissReason(StrEnum):
    """Why a request got nothing from a source. Causes that cannot be distinguished are NOT_STORED."""

    NOT_STORED = "not_stored"  # never stored, or evicted so long ago that no record is left
    EVICTED = "evicted"  # stored before, and evicted recently
    STORING = "storing"  # a store of it is under way
    SHORT_PROMPT = "short_prompt"  # the prompt is shorter than a chunk
    LOCAL = "local"  # the engine's own prefix cache already holds all usable tokens
    OTHER_NAMESPACE = "other_namespace"  # the tiers hold another model of the same name
    UNNAMED = "unnamed"  # no chunk key can be computed for the prompt's content
    REFUSED = "refused"  # the offer or the peer is not usable
    SKIPPED = "skipped"  # the request must not read a cache, for example with prompt logprobs
    LOOKING = "looking"  # the look-up did not end in time
    LOST_BID = "lost_bid"  # another source, or computing, was cheaper
    BUSY = "busy"  # too many loads under way
    NO_ROOM = "no_room"  # too few free blocks for the load and the tokens after it
    ATTEMPTS = "attempts"  # the request had no load attempts left
    CHECKSUM = "checksum"  # the bytes read are damaged
    DEADLINE = "deadline"  # the load took longer than load_timeout_seconds
    FAILED = "failed"  # the load failed for another reason


class DecisionReason(StrEnum):
    """Why admission took a bid, or took none."""

    BEST = "the best bid"
    LOOKING = "a source that is still looking may have more"
    NOTHING = "no source has more"
    COMPUTING = "computing is better"
    SKIPPED = "it reads no cache"
    NO_ROOM = "the engine has no blocks for a load and what comes after it"
    ATTEMPTS = "no attempt is left"


class LoadOutcome(StrEnum):
    """How a load ended."""

    READY = "ready"
    FAILED = "failed"
    EXPIRED = "expired"  # its deadline passed; late writes may still land in its blocks
    DROPPED = "dropped"  # the request ended first, or another part of its prefix failed


@dataclass(frozen=True, slots=True)
class SourceMiss:
    """Why a source bids nothing.

    Attributes:
        source: name of the source.
        reason: the kind of miss.
        group: number and kind of the KV cache group with a missing chunk, ``several`` for more than one,
            empty if the miss has nothing to do with groups.
        detail: text for people.
    """

    source: str
    reason: MissReason
    group: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ValuedBid:
    """A bid and its value.

    Attributes:
        source: name of the source. The bid names the peer.
        bid: tokens by place, and whether the source is still looking.
        value: value under the policy; 0 for an excluded bid.
        excluded: why the bid may not be taken; empty if it may.
    """

    source: str
    bid: Bid
    value: float
    excluded: str = ""


@dataclass(frozen=True, slots=True)
class GroupBytes:
    """Bytes moved for a KV cache group, summed over all ranks.

    Attributes:
        group: number and kind.
        strategy: name of the transfer strategy.
        size: bytes.
    """

    group: str
    strategy: str
    size: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request reached the scheduler.

    Attributes:
        tokens: length of its prompt.
        sources: names of the sources that may serve it.
        declined: misses of sources that cannot serve it.
        trace_headers: W3C headers of the trace that the request belongs to; empty without one.
    """

    request_id: str
    at: float
    _: KW_ONLY
    tokens: int
    sources: tuple[str, ...]
    declined: tuple[SourceMiss, ...] = ()
    trace_headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class SourcesAsked:
    """Admission asked the sources. Emitted again only if an answer has changed.

    Attributes:
        local_tokens: tokens in the engine's own prefix cache.
        bids: all bids, in the order of their sources.
        compute_value: the policy's value of computing the whole rest.
        misses: sources that bid nothing.
        chosen: the best bid, None to compute. A bid that is still looking is waited for.
        why: reason for the choice.
    """

    request_id: str
    at: float
    _: KW_ONLY
    local_tokens: int
    bids: tuple[ValuedBid, ...]
    compute_value: float
    misses: tuple[SourceMiss, ...]
    chosen: Bid | None
    why: DecisionReason


@dataclass(frozen=True, slots=True)
class LoadBegan:
    """The engine allocated blocks for the chosen bid, and its load was ordered.

    Attributes:
        load: unique name of the load.
        source: name of the source.
        peer: name of the peer; the source's name for tiers.
        parts: tokens by place, as in the bid.
        begin, end: the loaded tokens, half-open.
        attempt: name of the attempt, shared by the loads of two parts of one prefix.
    """

    request_id: str
    at: float
    _: KW_ONLY
    load: str
    source: str
    peer: str
    parts: tuple[Part, ...]
    begin: int
    end: int
    attempt: str


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """All ranks reported a load. A load past its deadline may still write to its blocks.

    Attributes:
        load, source: as in `LoadBegan`.
        outcome: how it ended.
        miss: kind of failure; None if it did not fail.
        failure: text for people; empty if it did not fail.
        seconds: time since the load began.
        moved: bytes by group; empty for a failed load.
        figures: amounts and times of a load from a peer, also of a failed one.
    """

    request_id: str
    at: float
    _: KW_ONLY
    load: str
    source: str
    outcome: LoadOutcome
    miss: MissReason | None
    failure: str
    seconds: float
    moved: tuple[GroupBytes, ...] = ()
    figures: LoadFigures = NO_FIGURES


@dataclass(frozen=True, slots=True)
class SourceRefused:
    """A source is excluded for the rest of this request.

    Attributes:
        source: name of the peer, or of what caused the failure.
        reason: text for people.
    """

    request_id: str
    at: float
    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class Scheduled:
    """The engine schedules a request, and computes the tokens that are not cached.

    Attributes:
        cached_tokens: tokens that need no computation.
        tokens: all tokens of the request.
        other_connector_tokens: cached tokens that another connector of this engine loaded.
    """

    request_id: str
    at: float
    cached_tokens: int
    tokens: int
    other_connector_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The request ended, with or without an answer."""

    request_id: str
    at: float


@dataclass(frozen=True, slots=True)
class StoreBegan:
    """Ranks were ordered to copy chunks to host memory.

    Attributes:
        store: unique name of the order.
        group: number and kind of the KV cache group.
        chunks: number of chunks.
    """

    request_id: str
    at: float
    store: str
    group: str
    chunks: int


@dataclass(frozen=True, slots=True)
class StoreEnded:
    """All ranks reported a store.

    Attributes:
        store: as in `StoreBegan`.
        failure: text for people; empty if it succeeded.
        size: bytes over all ranks.
        seconds: time of the slowest rank.
    """

    request_id: str
    at: float
    _: KW_ONLY
    store: str
    failure: str
    size: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """The producer keeps the blocks of a prompt for a consumer, or of a whole request for its next turn.

    Attributes:
        tokens: number of tokens offered.
        seconds: time until the lease expires without a heartbeat.
        turn: the blocks are kept for the next turn, for any reader.
    """

    request_id: str
    at: float
    tokens: int
    seconds: float
    turn: bool = False


@dataclass(frozen=True, slots=True)
class LeaseExtended:
    """The consumer's heartbeat extended a lease."""

    request_id: str
    at: float


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """The consumer released a lease, or it expired, or the producer withdrew it.

    Attributes:
        expired: no heartbeat came in time.
        withdrawn: the cache was reset, or the request was aborted after one of its samples had ended.
    """

    request_id: str
    at: float
    expired: bool
    withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class TierChanged:
    """What changed in a tier since its last event. Belongs to no request.

    Attributes:
        tier: name of the tier.
        used, capacity: bytes; None if unknown.
        owed: chunks that wait to be written to the tier; None for host memory.
        fetched, stored, evicted: number of chunks since the last event.
        stored_bytes: bytes since the last event.
        missed, dropped: number of chunks since the last event, by reason.
        fetch_seconds, store_seconds: time of each chunk that the tier's threads read or wrote.
    """

    at: float
    tier: str
    _: KW_ONLY
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
    """The number of blocks held by loads past their deadline, or of ended requests, changed."""

    at: float
    blocks: int


RequestEvent: TypeAlias = (
    Arrived
    | SourcesAsked
    | LoadBegan
    | LoadEnded
    | SourceRefused
    | Scheduled
    | Finished
    | StoreBegan
    | StoreEnded
    | LeaseGranted
    | LeaseExtended
    | LeaseEnded
)
Event: TypeAlias = RequestEvent | TierChanged | LateBlocks


def with_short_id(event: Event) -> Event:
    """Return the event with a request id of at most `MAX_ID_CHARACTERS`; clients choose ids of any length."""
    if isinstance(event, TierChanged | LateBlocks) or len(event.request_id) <= MAX_ID_CHARACTERS:
        return event
    return replace(event, request_id=shown(event.request_id, MAX_ID_CHARACTERS))
