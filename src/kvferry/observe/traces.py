"""Keep the events of the latest requests in memory, for `kvferry explain`.

The engine's thread writes, and any thread may read. No thread waits: a reader copies with single calls that
are atomic under Python's interpreter lock. Memory is bounded. Frequent events (stored chunks, heartbeats) are
only counted. Of the other events, the first `FIRST_EVENTS` and the last `LAST_EVENTS` of a request are kept.
The oldest requests are dropped if there are more than `EVENTS_PER_REQUEST` events per request on average.
Long texts are cut.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import get_args

from kvferry.connector import events
from kvferry.connector.events import Event, RequestEvent, SourceMiss

EVENTS_PER_REQUEST = 16
"""Maximum average number of events per remembered request."""
FIRST_EVENTS, LAST_EVENTS = 32, 32
"""Maximum numbers of events that are kept from the beginning and from the end of a request."""
MAX_TEXT = 500
"""Maximum number of characters of a text in an event."""

_OF_REQUEST = get_args(RequestEvent)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChunks:
    """A summary of the stores to host memory for one request and one KV cache group."""

    group: str
    ordered: int  # number of chunks whose copy was started; `done` and `failed` count those that ended
    first: float  # start of the first copy, in monotonic seconds
    done: int = 0
    failed: int = 0
    size: int = 0
    last: float = 0.0  # end of the last copy, in monotonic seconds; 0 if none has ended
    failure: str = ""  # reason of the latest failure; empty if no copy failed
    # (tier, reason, number) of chunks that were not written to a tier.
    declined: tuple[tuple[str, str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """The events of one request so far."""

    request_id: str
    events: tuple[RequestEvent, ...]  # events in the order of time, without events of stores and heartbeats
    left_out: int = 0
    stored: tuple[StoredChunks, ...] = ()  # summaries of the stores to host memory, one per KV cache group
    # Number of heartbeats by which the reading engine extended its lease on this request's blocks.
    heartbeats: int = 0


@dataclass(slots=True)
class _GrowingTrace:
    """The trace of a request, to which the engine's thread adds events. Mutable.

    The attributes are those of `RequestTrace`. `stored` maps a KV cache group's label to its summary.
    """

    request_id: str
    events: list[RequestEvent] = field(default_factory=list)
    left_out: int = 0
    stored: dict[str, StoredChunks] = field(default_factory=dict)
    heartbeats: int = 0

    def copy(self) -> RequestTrace:
        """Return an immutable copy of the trace. Any thread may call this."""
        # Single calls: the engine's thread may add events meanwhile.
        told, stored = tuple(self.events), tuple(self.stored.copy().values())
        return RequestTrace(self.request_id, told, self.left_out, stored, self.heartbeats)


class TraceBuffer:
    """Listener of the connector's events that remembers the events of the latest requests.

    Only the engine's thread may pass events. Any thread may call `last`.
    """

    def __init__(self, requests: int) -> None:
        self._max_requests = requests
        self._traces: OrderedDict[str, _GrowingTrace] = OrderedDict()
        self._events = 0

    def __len__(self) -> int:
        return len(self._traces)

    def __call__(self, event: Event) -> None:
        """Add an event to the trace of its request. Events that belong to no request are ignored."""
        if isinstance(event, events.Arrived):
            self._begin(event)
        elif not isinstance(event, _OF_REQUEST):
            return
        elif (trace := self._traces.get(event.request_id)) is not None:
            self._add(trace, event)

    def last(self) -> Iterator[RequestTrace]:
        """Return an iterator over copies of the traces, the latest first. Any thread may call this."""
        # The list is made in one call, which no other thread interrupts.
        return (trace.copy() for trace in reversed(list(self._traces.values())))

    def _begin(self, event: events.Arrived) -> None:
        self._forget(event.request_id)
        self._traces[event.request_id] = _GrowingTrace(event.request_id, [_cut(event)])
        self._events += 1
        while (
            len(self._traces) > self._max_requests or self._events > self._max_requests * EVENTS_PER_REQUEST
        ):
            self._forget(next(iter(self._traces)))

    def _forget(self, request_id: str) -> None:
        if (trace := self._traces.pop(request_id, None)) is not None:
            self._events -= len(trace.events)

    def _add(self, trace: _GrowingTrace, event: RequestEvent) -> None:
        if isinstance(event, events.LeaseExtended):
            # A peer extends a lease again and again, for as long as it waits.
            trace.heartbeats += 1
        elif isinstance(event, events.StoreBegan):
            so_far = trace.stored.get(event.group) or StoredChunks(
                group=event.group, ordered=0, first=event.at
            )
            trace.stored[event.group] = replace(so_far, ordered=so_far.ordered + event.chunks)
        elif isinstance(event, events.StoreEnded):
            if (group := event.began.group) in trace.stored:
                trace.stored[group] = _ended(trace.stored[group], event)
        else:
            trace.events.append(_cut(event))
            if len(trace.events) > FIRST_EVENTS + LAST_EVENTS:
                # The beginning and the end of a request explain most.
                del trace.events[FIRST_EVENTS]
                trace.left_out += 1
            else:
                self._events += 1


def _ended(stored: StoredChunks, event: events.StoreEnded) -> StoredChunks:
    chunks = event.began.chunks
    if event.failure:
        return replace(stored, failed=stored.failed + chunks, last=event.at, failure=_short(event.failure))
    declined = Counter({(tier, reason): n for tier, reason, n in stored.declined})
    declined.update({(tier, reason): n for tier, reason, n in event.declined})
    return replace(
        stored,
        done=stored.done + chunks,
        size=stored.size + event.size,
        last=event.at,
        declined=tuple((*of, n) for of, n in declined.items()),
    )


def _cut(event: RequestEvent) -> RequestEvent:
    # Peers and clients write them, so they can have any length.
    if all(len(text) <= MAX_TEXT for text in _texts(event)):
        return event
    if isinstance(event, events.SourceRefused):
        return replace(event, reason=_short(event.reason))
    if isinstance(event, events.LoadEnded):
        return replace(event, failure=_short(event.failure))
    if isinstance(event, events.Arrived):
        headers = tuple((name, _short(value)) for name, value in event.trace_headers)
        return replace(event, declined=_shorten_misses(event.declined), trace_headers=headers)
    if isinstance(event, events.SourcesAsked):
        bids = tuple(replace(one, excluded=_short(one.excluded)) for one in event.bids)
        return replace(event, bids=bids, misses=_shorten_misses(event.misses))
    return event


def _texts(event: RequestEvent) -> list[str]:
    if isinstance(event, events.SourcesAsked):
        return [*(one.excluded for one in event.bids), *(one.detail for one in event.misses)]
    if isinstance(event, events.Arrived):
        return [*(value for _, value in event.trace_headers), *(one.detail for one in event.declined)]
    if isinstance(event, events.LoadEnded):
        return [event.failure]
    return [event.reason] if isinstance(event, events.SourceRefused) else []


def _shorten_misses(misses: tuple[SourceMiss, ...]) -> tuple[SourceMiss, ...]:
    return tuple(replace(one, detail=_short(one.detail)) for one in misses)


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} ..."
