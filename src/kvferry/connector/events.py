"""Events of requests and tiers, emitted where the decision is made, in the order in which they happen.

These are the events of one request. Those in brackets may be missing or repeated:

    Arrived ─▶ [SourcesAsked …] ─▶ [LoadBegan ─▶ LoadEnded [─▶ SourceRefused ─▶ SourcesAsked …]] ─▶ Scheduled
    ─▶ … ─▶ Finished

A prefix that comes from two sources has two loads at a time. StoreBegan ─▶ StoreEnded may come at any time
after Scheduled. A preempted request has SourcesAsked, LoadBegan, … and Scheduled once more. A producer's
requests then have LeaseGranted ─▶ [LeaseExtended …] ─▶ LeaseEnded. Loads and stores may end after their
request.

A *source* bids for requests: ``peer`` or ``tiers``. A *place* holds tokens: ``peer``, or a tier, for
example ``host``, ``file`` or ``object``. In all events, ``request_id`` is the engine's id of the request, and
``at`` is the time of the event in seconds of the monotonic clock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from enum import StrEnum
from functools import wraps
from typing import ParamSpec, TypeAlias

from kvferry.common.limited_log import LimitedLog
from kvferry.common.text import shown
from kvferry.connector.engine import BlockRun
from kvferry.connector.load import NO_FIGURES, Bid, GroupBytes, LoadFigures, LoadOutcome, PlaceTokens


class MissReason(StrEnum):
    """The reason why a request got no KV from a source."""

    NOT_STORED = "not_stored"  # never stored, or evicted so long ago that no record is left
    EVICTED = "evicted"  # stored before, and evicted recently
    STORING = "storing"  # a store of it is under way
    SHORT_PROMPT = "short_prompt"  # the prompt is shorter than a chunk
    LOCAL = "local"  # the engine's own prefix cache already holds all usable tokens
    OTHER_NAMESPACE = "other_namespace"  # the tiers hold another model of the same name
    UNNAMED = "unnamed"  # no chunk key can be computed for the prompt's content
    REFUSED = "refused"  # the offer or the peer is not usable
    GONE = "gone"  # the peer cannot be reached, or has not answered in time
    SKIPPED = "skipped"  # the request must not read a cache, for example with prompt logprobs
    LOOKING = "looking"  # the look-up did not end in time
    LOST_BID = "lost_bid"  # another source, or computing the prompt, was better
    BUSY = "busy"  # too many loads under way
    NO_ROOM = "no_room"  # too few free blocks for the load and the tokens after it
    ATTEMPTS = "attempts"  # the request had no load attempts left
    CHECKSUM = "checksum"  # the bytes read are damaged
    DEADLINE = "deadline"  # the load took longer than load_timeout_seconds
    FAILED = "failed"  # the load failed for another reason


class DecisionReason(StrEnum):
    """The reason why admission took a source's bid, or took no bid."""

    BEST = "the best bid"
    ANSWERED = "the best bid of a source that has answered"
    LOOKING = "a source that is still looking may have more"
    UNANSWERED = "no source has answered in time"
    NOTHING = "no source has more"
    COMPUTING = "computing is better"
    SKIPPED = "it reads no cache"
    NO_ROOM = "the engine has no blocks for a load and what comes after it"
    ATTEMPTS = "no attempt is left"


@dataclass(frozen=True, slots=True)
class SourceMiss:
    """The reason why a source does not offer to load any tokens of a request.

    Attributes:
        group: label (number and kind) of the KV cache group with a missing chunk; ``several`` for more than
            one group; empty if the miss does not depend on groups.
        detail: the reason in detail, as text for people.
    """

    source: str
    reason: MissReason
    group: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ValuedBid:
    """A bid and its value.

    Attributes:
        source: name of the source: ``peer`` or ``tiers``. The bid itself names the peer.
        value: value of the bid under the policy; 0 for an excluded bid.
        excluded: reason why the bid may not be taken; empty if the bid may be taken.
    """

    source: str
    bid: Bid
    value: float
    excluded: str = ""


@dataclass(frozen=True, slots=True)
class Arrived:
    """Event: a request reached the engine's scheduler.

    Attributes:
        tokens: length of the prompt.
        sources: names of the sources that may be able to serve the request.
        declined: reasons why other sources cannot serve the request.
        ticket: True if the request came with a peer's ticket for KV.
        trace_headers: (name, value) of each W3C header of the trace that the request belongs to; empty
            without a trace.
    """

    request_id: str
    at: float
    _: KW_ONLY
    tokens: int
    sources: tuple[str, ...]
    declined: tuple[SourceMiss, ...] = ()
    ticket: bool = False
    trace_headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class SourcesAsked:
    """Event: for one request, admission chose a source's bid, or chose to compute the tokens.

    It is emitted again when the bids, the choice or the numbers of tokens change.

    Attributes:
        local_tokens: number of tokens in the engine's own prefix cache.
        resumable_tokens: number of these tokens that the engine can use if nothing is loaded. It is less than
            `local_tokens` if the engine lacks the recurrent state after them.
        bids: all bids, in the order of their sources.
        compute_value: value, under the policy, of computing all tokens that are not in the prefix cache.
        misses: for each source without a bid, the reason why it makes none.
        chosen: the best bid; None if the engine computes the tokens. If the bid's source is still looking up
            its KV, the request waits for that source.
    """

    request_id: str
    at: float
    _: KW_ONLY
    local_tokens: int
    resumable_tokens: int
    bids: tuple[ValuedBid, ...]
    compute_value: float
    misses: tuple[SourceMiss, ...]
    chosen: Bid | None
    why: DecisionReason


@dataclass(frozen=True, slots=True)
class LoadBegan:
    """Event: the engine allocated blocks for the chosen source's offer, and the load from this source began.

    Attributes:
        load: unique name of the load.
        source: name of the source: ``peer`` or ``tiers``.
        peer: name of the peer; ``tiers`` for a load from tiers.
        parts: number of tokens to load by place (``peer`` or the name of a tier).
        begin, end: range of the loaded tokens, half-open.
        attempt: name of the attempt to load the request's prefix. Two sources that load one prefix together
            do so in one attempt.
    """

    request_id: str
    at: float
    _: KW_ONLY
    load: str
    source: str
    peer: str
    parts: tuple[PlaceTokens, ...]
    begin: int
    end: int
    attempt: str


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """Event: all ranks have reported that a load succeeded, failed, or was given up.

    A load that was given up, or that passed its deadline, may still write to its blocks after this event.

    Attributes:
        miss: kind of failure; None if the load did not fail, or if its request no longer waits for the load.
        failure: reason why the load failed or was dropped, as text for people; empty for a successful load.
        moved: bytes moved per KV cache group; empty for a failed load.
        figures: bytes, counts and seconds per stage of a load from a peer, even if the load has failed;
            `NO_FIGURES` for other sources.
    """

    request_id: str
    at: float
    _: KW_ONLY
    began: LoadBegan
    outcome: LoadOutcome
    miss: MissReason | None = None
    failure: str = ""
    moved: tuple[GroupBytes, ...] = ()
    figures: LoadFigures = NO_FIGURES

    @property
    def seconds(self) -> float:
        """Duration of the load."""
        return self.at - self.began.at


@dataclass(frozen=True, slots=True)
class SourceRefused:
    """Event: a source could not serve a request. A peer is then not asked again for this request.

    Attributes:
        source: name of the peer, ``tiers``, or ``its offer`` if the request came with an invalid offer.
        reason: reason as text for people.
    """

    request_id: str
    at: float
    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Event: the engine schedules a request, and computes the tokens that are not cached.

    Attributes:
        cached_tokens: number of tokens that need no computation.
        tokens: number of all tokens of the request, cached or not.
        other_connector_tokens: number of cached tokens that another connector of this engine loaded.
        loads: the loads whose tokens are among the cached ones.
    """

    request_id: str
    at: float
    cached_tokens: int
    tokens: int
    other_connector_tokens: int = 0
    loads: tuple[LoadBegan, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """Event: a request ended, with or without an answer."""

    request_id: str
    at: float


@dataclass(frozen=True, slots=True)
class StoreBegan:
    """Event: the ranks were ordered to copy chunks of a request's KV to host memory.

    Attributes:
        store: unique name of the store operation.
        group: label (number and kind) of the KV cache group.
    """

    request_id: str
    at: float
    store: str
    group: str
    chunks: int


@dataclass(frozen=True, slots=True)
class StoreEnded:
    """Event: all ranks have reported that their copies of chunks to host memory have ended.

    Attributes:
        failure: reason for the failure as text for people; empty if the store succeeded.
        size: number of bytes copied by all ranks.
        seconds: seconds that the slowest rank took.
    """

    request_id: str
    at: float
    _: KW_ONLY
    began: StoreBegan
    failure: str
    size: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """Event: the engine granted a lease: it keeps blocks of a request so that peers can read them.

    Attributes:
        tokens: number of tokens offered.
        seconds: seconds without a heartbeat after which the lease expires.
        turn: True if a finished request's blocks are kept, so that any peer may read them for the next turn
            of the conversation; False if a prompt's blocks are kept for the engine that continues the
            request.
    """

    request_id: str
    at: float
    tokens: int
    seconds: float
    turn: bool = False


@dataclass(frozen=True, slots=True)
class LeaseExtended:
    """Event: a heartbeat of the consumer extended a lease on blocks."""

    request_id: str
    at: float


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """Event: a lease on blocks ended. The consumer released it, it expired, or the engine ended it.

    Attributes:
        expired: True if the lease ended because no heartbeat arrived in time, or because requests waited for
            blocks and no consumer had claimed the lease. Always False for the lease of a turn.
        withdrawn: True if the lease ended because the cache was reset, the engine stopped offering KV, or
            another sample of the prompt was aborted. Always False for the lease of a turn.
    """

    request_id: str
    at: float
    expired: bool
    withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class TierChanged:
    """Event: the size of one tier now, and its activity since the tier's last event.

    If any tier has changed, an event is emitted for each tier.

    Attributes:
        used: number of bytes in use; None if unknown.
        capacity: size of the tier in bytes; None if unknown.
        owed: number of chunks still to be written to the tier; None for host memory.
        fetched, stored, evicted: number of chunks read, stored and evicted since the last event.
        stored_bytes: number of bytes stored since the last event.
        missed: number of chunks not found since the last event, by reason.
        dropped: number of chunks not stored since the last event, by reason.
        fetch_seconds, store_seconds: seconds of each read and write of a chunk since the last event. For host
            memory, `fetch_seconds` are the times of copies to KV blocks.
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
class SnapshotsPlaced:
    """Event: the tiers of a model with recurrent state have started.

    Attributes:
        first_tokens: first position in a prompt of a snapshot for shared prefixes; 0 for none.
        state_bytes: size of a snapshot in bytes.
    """

    first_tokens: int
    state_bytes: int


@dataclass(frozen=True, slots=True)
class LateBlocks:
    """Event: the number of blocks that late loads hold has changed.

    A load is late if its request no longer waits for it but it may still write to its blocks.
    """

    at: float
    blocks: int


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Event: a tier has gained blocks. It is emitted only if the engine publishes events about its blocks.

    Attributes:
        blocks: the blocks, under the names that the engine's prefix cache gives them.
    """

    at: float
    tier: str
    blocks: BlockRun


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Event: a tier has lost blocks of one KV cache group that a `BlocksStored` event named.

    Attributes:
        group: index of the engine's KV cache group.
        hashes: hash of each block in the engine's prefix cache.
    """

    at: float
    tier: str
    group: int
    hashes: tuple[bytes, ...]


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
TierEvent: TypeAlias = TierChanged | SnapshotsPlaced | LateBlocks | BlocksStored | BlocksRemoved
Event: TypeAlias = RequestEvent | TierEvent


logger = logging.getLogger(__name__)
_SHOWN = 1000
MAX_ID_CHARACTERS = 256
"""Maximum length of a request id in an event. The middle of a longer id is left out."""

_P = ParamSpec("_P")

Listener: TypeAlias = Callable[[Event], None]


def log_errors(emit: Callable[_P, None]) -> Callable[_P, None]:
    """Return a function that calls `emit` and never raises. Only the first exception is logged.

    An error in the code that observes a request must not affect the request.
    """
    logged = False

    @wraps(emit)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> None:
        nonlocal logged
        try:
            emit(*args, **kwargs)
        except Exception:
            if not logged:
                logger.exception("%s emitted no event; tell kvferry's authors", emit.__qualname__)
            logged = True

    return guarded


class EventStream:
    """Passes the events of one engine to its listeners, in the thread that emits them. Not thread-safe."""

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = list(listeners)

    def subscribe(self, listener: Listener) -> None:
        """Call `listener` with every event from now on."""
        self._listeners.append(listener)

    def emit(self, event: Event) -> None:
        """Call every listener with the event. A long request id is shortened to `MAX_ID_CHARACTERS`.

        A listener that raises is removed, and the exception is logged.
        """
        event = _with_short_id(event)
        for listener in tuple(self._listeners):
            try:
                listener(event)
            except Exception:
                self._listeners.remove(listener)
                logger.exception(
                    "%r failed at %s and receives no more events: what it shows stands still, requests are "
                    "served as before; tell kvferry's authors",
                    listener, shown(repr(event), _SHOWN),
                )  # fmt: skip


def short_id(request_id: str) -> str:
    """Return a request's id as events have it. Clients choose ids of any length."""
    return request_id if len(request_id) <= MAX_ID_CHARACTERS else shown(request_id, MAX_ID_CHARACTERS)


def _with_short_id(event: Event) -> Event:
    if isinstance(event, TierEvent) or len(event.request_id) <= MAX_ID_CHARACTERS:
        return event
    return replace(event, request_id=short_id(event.request_id))


_REASON_CHARACTERS = 500


class Refusals:
    """Reports the requests that a source of KV does not serve: an event for each, and some log lines.

    Each pair of source and reason is logged at most once a minute, and at most 20 lines are logged a minute.
    """

    def __init__(self, events: EventStream | None = None) -> None:
        self._events = events or EventStream()
        self._log = LimitedLog(logger)

    def say(self, request_id: str, source: str, reason: str) -> None:
        """Report that a source of KV does not serve a request.

        Emit a `SourceRefused` event. Also write a log line, unless the class's limit on log lines is reached.
        """
        source, reason = shown(source), shown(reason, _REASON_CHARACTERS)
        self._events.emit(SourceRefused(request_id, time.monotonic(), source, reason))
        text = f"request {shown(request_id)} is not served by {source}: {reason}"
        self._log.say(f"{source}: {reason}", text)
