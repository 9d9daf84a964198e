"""Turn the connector's events into OpenTelemetry spans of the trace that a request belongs to.

Each load, store and lease has a span, and so has each wait of a request for a source's answer.
Attributes have the names that OpenTelemetry defines, if there are any. ``gen_ai.request.id`` has the same
value as in the engine's own span.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kvferry.connector import events
from kvferry.connector.events import DecisionReason, Event, LoadOutcome

Headers: TypeAlias = tuple[tuple[str, str], ...]
Attributes: TypeAlias = dict[str, str | int | float | bool]

MAX_REQUESTS = 16_384
"""Maximum number of requests whose parent trace is remembered.

A parent trace is kept after its request has ended, because stores and leases of the request may end later.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpan:
    """An OpenTelemetry span of a finished operation, such as a load or a store of KV.

    Attributes:
        parent: W3C trace headers of the parent span; empty if the request has none.
        begin, end: start time and end time of the operation, in monotonic seconds.
        failure: reason for the failure; empty if the operation succeeded.
    """

    name: str
    request_id: str
    parent: Headers
    begin: float
    end: float
    attributes: Attributes = field(default_factory=dict)
    failure: str = ""


class SpanListener:
    """Listener of the connector's events that creates a span when an operation ends. Not thread-safe."""

    def __init__(self, emit: Callable[[TraceSpan], None]) -> None:
        self._emit = emit
        self._parents: OrderedDict[str, Headers] = OrderedDict()
        self._looking: dict[str, events.SourcesAsked] = {}
        self._handlers: Mapping[type[Event], Callable[[Any], None]] = {
            events.Arrived: self._arrived,
            events.SourcesAsked: self._asked,
            events.LoadBegan: self._wait_ended,
            events.LoadEnded: self._load_ended,
            events.Scheduled: self._wait_ended,
            events.Finished: self._wait_ended,
            events.StoreEnded: self._store_ended,
            events.LeaseEnded: self._lease_ended,
        }

    def __call__(self, event: Event) -> None:
        if (note := self._handlers.get(type(event))) is not None:
            note(event)

    def _arrived(self, event: events.Arrived) -> None:
        if event.trace_headers:
            self._parents[event.request_id] = event.trace_headers
            if len(self._parents) > MAX_REQUESTS:
                self._parents.popitem(last=False)

    def _asked(self, event: events.SourcesAsked) -> None:
        # The wait ends with any other answer.
        if event.why is not DecisionReason.LOOKING:
            self._wait_ended(event)
        else:
            # The first event is the beginning of the wait.
            self._looking.setdefault(event.request_id, event)

    def _wait_ended(
        self, event: events.SourcesAsked | events.LoadBegan | events.Scheduled | events.Finished
    ) -> None:
        asked = self._looking.pop(event.request_id, None)
        if asked is not None and asked.chosen is not None:
            self._end("kvferry.wait", asked, event, {"kvferry.source": asked.chosen.source})

    def _load_ended(self, event: events.LoadEnded) -> None:
        began = event.began
        attributes: Attributes = {
            "kvferry.source": began.source,
            "kvferry.outcome": str(event.outcome),
            "kvferry.tokens": began.end - began.begin,
            "kvferry.bytes": sum(moved.size for moved in event.moved),
        }
        # Tiers have no other name.
        if began.peer != began.source:
            attributes["kvferry.peer"] = began.peer
        for part in began.parts:
            attributes[f"kvferry.tokens.{part.place}"] = part.tokens
        for moved in event.moved:
            attributes[f"kvferry.bytes.{moved.group}"] = moved.size
        if (figures := event.figures).pages:
            attributes |= {
                "kvferry.pages": figures.pages,
                "kvferry.descriptors": figures.descriptors,
                "kvferry.plan_seconds": figures.plan_seconds,
                "kvferry.read_seconds": figures.transfer_seconds,
                "kvferry.check_seconds": figures.check_seconds,
            }
        if event.miss is not None:
            attributes["error.type"] = str(event.miss)
        # A load that is no longer needed has not failed.
        failure = "" if event.outcome in {LoadOutcome.READY, LoadOutcome.DROPPED} else event.failure
        self._end("kvferry.load", began, event, attributes, failure)

    def _store_ended(self, event: events.StoreEnded) -> None:
        attributes: Attributes = {
            "kvferry.group": event.began.group,
            "kvferry.chunks": event.began.chunks,
            "kvferry.bytes": event.size,
        }
        self._end("kvferry.store", event.began, event, attributes, event.failure)

    def _lease_ended(self, event: events.LeaseEnded) -> None:
        attributes: Attributes = {"kvferry.tokens": event.granted.tokens, "kvferry.expired": event.expired}
        self._end("kvferry.lease", event.granted, event, attributes)

    def _end(
        self,
        name: str,
        began: events.RequestEvent,
        ended: events.RequestEvent,
        attributes: Attributes,
        failure: str = "",
    ) -> None:
        self._emit(
            TraceSpan(
                name=name,
                request_id=began.request_id,
                parent=self._parents.get(began.request_id, ()),
                begin=began.at,
                end=ended.at,
                attributes=attributes,
                failure=failure,
            )
        )
