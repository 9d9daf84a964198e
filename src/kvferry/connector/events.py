"""Events of requests and tiers, emitted where the decision is made, in the order in which they happen.

These are the events of one request. Those in brackets may be missing or repeated:

    Arrived ─▶ [SourcesAsked …] ─▶ [LoadBegan ─▶ LoadEnded [─▶ SourceRefused ─▶ SourcesAsked …]] ─▶ Scheduled
    ─▶ … ─▶ Finished

A prefix that comes from two sources has two loads at a time. StoreBegan ─▶ StoreEnded may come at any time
after Scheduled, and Hinted at any time after Arrived. A preempted request has SourcesAsked, LoadBegan, … and
Scheduled once more. A producer's requests then have LeaseGranted ─▶ [LeaseExtended …] ─▶ LeaseEnded. Loads
and stores may end after their request.

A *source* bids for requests: ``peer`` or ``tiers``. A *place* holds tokens: ``peer``, or a tier such as
``host``, ``file`` or ``object``. A *group* is the label (number and kind) of a KV cache group. In all events,
``at`` is in seconds of the monotonic clock. Reasons and failures are text for people.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from enum import StrEnum
from functools import wraps
from typing import ParamSpec, TypeAlias

from kvferry.common.limited_log import LimitedLog
from kvferry.common.text import shown
from kvferry.connector.bids import Bid, PlaceTokens
from kvferry.connector.engine import BlockRun
from kvferry.transport.read_plan import NO_FIGURES, LoadFigures

logger = logging.getLogger(__name__)

# The middle of a longer request id is left out of events.
MAX_ID_CHARACTERS = 256
_REASON_CHARACTERS = 500
_EVENT_CHARACTERS = 1000


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


class HintKind(StrEnum):
    """A kind of hint."""

    RETAIN = "retain"
    NO_STORE = "no_store"
    PREFETCH = "prefetch"
    END_SESSION = "end_session"
    MALFORMED = "malformed"


class HintOutcome(StrEnum):
    """The outcome of a hint."""

    APPLIED = "applied"
    PARTIAL = "partial"  # for some of the chunks that it is about
    IGNORED = "ignored"


class LoadOutcome(StrEnum):
    """The outcome of a load."""

    READY = "ready"
    FAILED = "failed"
    EXPIRED = "expired"  # failed in flight, mostly at its deadline; late writes may still land in its blocks
    DROPPED = "dropped"  # the request ended first, or another part of its prefix failed


@dataclass(frozen=True, slots=True)
class SourceMiss:
    """The reason why a source offers a request no tokens."""

    source: str
    reason: MissReason
    group: str = ""  # "several" if more than one lacks a chunk; empty if the miss does not depend on groups
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ValuedBid:
    """A source's bid, and its value under the policy."""

    source: str
    bid: Bid
    value: float  # 0 if excluded
    excluded: str = ""  # why the bid may not be taken; empty if it may


@dataclass(frozen=True, slots=True)
class GroupBytes:
    """The bytes that a load moved for one KV cache group, summed over all ranks."""

    group: str  # number and kind of the group, such as ``0 full_attention``
    strategy: str  # name of the transfer strategy; ``copied`` for a load from tiers
    size: int  # bytes


@dataclass(frozen=True, slots=True)
class _OfRequest:
    request_id: str
    at: float


@dataclass(frozen=True, slots=True)
class Arrived(_OfRequest):
    """A request reached the engine's scheduler.

    Attributes:
        sources, declined: sources that may be able to serve the request, and those that cannot.
    """

    _: KW_ONLY
    tokens: int
    sources: tuple[str, ...]
    declined: tuple[SourceMiss, ...] = ()
    ticket: bool = False
    trace_headers: tuple[tuple[str, str], ...] = ()  # (name, value) of each W3C header of the request's trace
    # Label and digest of the request's tenant, if tenants share the tiers by weight; else empty.
    tenant: str = ""
    tenant_digest: str = ""


@dataclass(frozen=True, slots=True)
class SourcesAsked(_OfRequest):
    """Admission chose a source's bid for a request, or chose to compute the tokens.

    It is emitted again when the bids, the choice or the numbers of tokens change.
    """

    _: KW_ONLY
    local_tokens: int  # number of tokens in the engine's own prefix cache
    # Number of these tokens that the engine can use if nothing is loaded. It is less than `local_tokens` if
    # the engine lacks the recurrent state after them.
    resumable_tokens: int
    bids: tuple[ValuedBid, ...]
    compute_value: float  # value of computing all tokens that are not in the prefix cache
    misses: tuple[SourceMiss, ...]
    # The best bid, for which the request waits if its source is still looking; None to compute.
    chosen: Bid | None
    why: DecisionReason


@dataclass(frozen=True, slots=True)
class LoadBegan(_OfRequest):
    """The engine allocated blocks for a source's offer, and the load of tokens `begin` to `end` began.

    `load` and `attempt` are unique names. Two loads may share an attempt. `peer` is ``tiers`` for tiers.
    """

    _: KW_ONLY
    load: str
    source: str
    peer: str
    parts: tuple[PlaceTokens, ...]
    begin: int
    end: int
    attempt: str


@dataclass(frozen=True, slots=True)
class LoadEnded(_OfRequest):
    """All ranks have reported that a load succeeded, failed, or was given up.

    A load that was given up, or that passed its deadline, may still write to its blocks after this event.
    """

    _: KW_ONLY
    began: LoadBegan
    outcome: LoadOutcome
    # None if the load did not fail, or if its request no longer waits for the load.
    miss: MissReason | None = None
    failure: str = ""  # reason why the load failed or was dropped; empty for a successful load
    moved: tuple[GroupBytes, ...] = ()  # bytes per KV cache group; empty for a failed load
    figures: LoadFigures = NO_FIGURES  # of a load from a peer, even if it has failed

    @property
    def seconds(self) -> float:
        return self.at - self.began.at


@dataclass(frozen=True, slots=True)
class SourceRefused(_OfRequest):
    """A source could not serve a request. A peer is then not asked again for this request.

    `source` is the name of a peer, ``tiers``, or ``its offer`` if the request came with an invalid offer.
    """

    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class Scheduled(_OfRequest):
    """The engine schedules a request of `tokens` tokens, and computes those that are not cached.

    Of the cached tokens, `loads` have brought some, and another connector of this engine others.
    """

    cached_tokens: int
    tokens: int
    other_connector_tokens: int = 0
    loads: tuple[LoadBegan, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished(_OfRequest):
    """A request ended, with or without an answer."""


@dataclass(frozen=True, slots=True)
class StoreBegan(_OfRequest):
    """The ranks were ordered to copy chunks of a request's KV to host memory."""

    store: str  # a unique name
    group: str
    chunks: int


@dataclass(frozen=True, slots=True)
class StoreEnded(_OfRequest):
    """All ranks have reported that a store's copies to host memory have ended."""

    _: KW_ONLY
    began: StoreBegan
    failure: str  # empty if it succeeded
    size: int  # in bytes
    seconds: float  # of the slowest rank
    # (tier, reason, number) of chunks that the tier's admission filter declined.
    declined: tuple[tuple[str, str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Hinted(_OfRequest):
    """A hint was applied to a request's chunks, or ignored. `detail` is text for people."""

    hint: HintKind
    outcome: HintOutcome
    detail: str


@dataclass(frozen=True, slots=True)
class LeaseGranted(_OfRequest):
    """The engine keeps blocks of a request so that peers can read them.

    `turn` is True for a finished request, whose blocks any peer may read for the conversation's next turn. It
    is False for a prompt, whose blocks are for the engine that continues the request.
    """

    tokens: int
    seconds: float  # without a heartbeat, after which the lease expires
    turn: bool = False


@dataclass(frozen=True, slots=True)
class LeaseExtended(_OfRequest):
    """A heartbeat of the consumer extended a lease."""


@dataclass(frozen=True, slots=True)
class LeaseEnded(_OfRequest):
    """The consumer released a lease, it expired, or the engine ended it."""

    _: KW_ONLY
    granted: LeaseGranted
    # True if no heartbeat arrived in time, or if requests waited for blocks and no consumer had claimed the
    # lease. Always False for the lease of a turn.
    expired: bool
    # True if the cache was reset, the engine stopped offering KV, or another sample of the prompt was
    # aborted. Always False for the lease of a turn.
    withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class TierChanged:
    """The size of a tier, and its activity since the tier's last event."""

    at: float
    tier: str
    _: KW_ONLY
    used: int | None = None  # bytes; None if unknown
    capacity: int | None = None  # bytes; None if unknown
    owed: int | None = None  # chunks still to be written to the tier; None for host memory
    fetched: int = 0
    stored: int = 0
    stored_bytes: int = 0
    evicted: int = 0
    missed: tuple[tuple[str, int], ...] = ()  # number of chunks that were not found, by reason
    dropped: tuple[tuple[str, int], ...] = ()  # number of chunks that were not stored, by reason
    # Number of chunks that the admission filter did not let be written, by reason.
    declined: tuple[tuple[str, int], ...] = ()
    fetch_seconds: tuple[float, ...] = ()  # of each read, or for host memory of each copy to KV blocks
    store_seconds: tuple[float, ...] = ()  # of each write
    served: int = 0  # number of chunks that other engines were told to read
    served_bytes: int = 0
    refused: int = 0  # number of chunks that they were told to read elsewhere
    address: str = ""  # address at which they read this engine's host memory; empty if they do not
    # (label, bytes in use, number of evicted chunks) of tenants, if they share the tier by weight.
    tenants: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class SnapshotsPlaced:
    """The tiers of a model with recurrent state have started."""

    first_tokens: int  # first position in a prompt of a snapshot for shared prefixes; 0 for none
    state_bytes: int


@dataclass(frozen=True, slots=True)
class LateBlocks:
    """The number of blocks has changed that loads may still write for requests that no longer wait."""

    at: float
    blocks: int


@dataclass(frozen=True, slots=True)
class RetainedBytes:
    """The number of bytes has changed that hints retain in host memory."""

    at: float
    size: int


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """A tier has gained blocks. Emitted only if the engine publishes events about its blocks."""

    at: float
    tier: str
    blocks: BlockRun


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """A tier has lost blocks of one KV cache group that a `BlocksStored` event named."""

    at: float
    tier: str
    group: int  # the engine's index
    hashes: tuple[bytes, ...]  # those of the engine's prefix cache


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
    | Hinted
    | LeaseGranted
    | LeaseExtended
    | LeaseEnded
)
Event: TypeAlias = (
    RequestEvent | TierChanged | SnapshotsPlaced | LateBlocks | RetainedBytes | BlocksStored | BlocksRemoved
)
Listener: TypeAlias = Callable[[Event], None]

_P = ParamSpec("_P")


def log_errors(emit: Callable[_P, None]) -> Callable[_P, None]:
    """Return a function that calls `emit` and never raises. Only the first exception is logged."""
    # An error in the code that observes a request must not affect the request.
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
    """Passes the events of one engine to its listeners, in the thread that emits them. Not thread-safe.

    Attributes:
        waiting: events that wait for `release`, in the order of their emission.
    """

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = list(listeners)
        self._refusals = LimitedLog(logger)
        self.waiting, self._held = deque[Event](), False

    def subscribe(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def hold(self) -> None:
        """Let events wait from now on, until `release`."""
        self._held = True

    def release(self) -> None:
        """Pass the events that wait, and let no more of them wait."""
        self._held = False
        while self.waiting:
            self._pass(self.waiting.popleft())

    def emit(self, event: Event) -> None:
        """Call every listener with the event, now or in `release`. Log and remove a listener that raises."""
        if self._held:
            self.waiting.append(event)
        else:
            self._pass(event)

    def _pass(self, event: Event) -> None:
        if isinstance(event, _OfRequest) and len(event.request_id) > MAX_ID_CHARACTERS:
            event = replace(event, request_id=short_id(event.request_id))
        for listener in tuple(self._listeners):
            try:
                listener(event)
            except Exception:
                self._listeners.remove(listener)
                logger.exception(
                    "%r failed at %s and receives no more events: what it shows stands still, requests are "
                    "served as before; tell kvferry's authors",
                    listener, shown(repr(event), _EVENT_CHARACTERS),
                )  # fmt: skip

    def refuse(self, request_id: str, source: str, reason: str) -> None:
        """Emit and log that a source does not serve a request. The log is limited per source and reason."""
        source, reason = shown(source), shown(reason, _REASON_CHARACTERS)
        self.emit(SourceRefused(request_id, time.monotonic(), source, reason))
        text = f"request {shown(request_id)} is not served by {source}: {reason}"
        self._refusals.say(f"{source}: {reason}", text)


def short_id(request_id: str) -> str:
    """Return a request's id as events have it."""
    # Clients choose ids of any length.
    return request_id if len(request_id) <= MAX_ID_CHARACTERS else shown(request_id, MAX_ID_CHARACTERS)
