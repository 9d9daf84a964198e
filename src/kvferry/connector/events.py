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

from dataclasses import KW_ONLY, dataclass
from typing import TypeAlias

from kvferry.connector.bids import Bid, Part
from kvferry.connector.decisions import DecisionReason, MissReason, SourceMiss, ValuedBid
from kvferry.connector.load_results import NO_FIGURES, GroupBytes, LoadFigures, LoadOutcome


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
