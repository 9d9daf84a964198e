"""Render the trace of a request as sentences by time, and the traces of several as a list."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.common.units import counted, format_age, format_bytes, format_count, format_seconds, plural
from kvferry.connector import (
    DecisionReason,
    HintKind,
    LoadOutcome,
    MissReason,
    PlaceTokens,
    RequestEvent,
    SourceMiss,
    events,
    trim_parts,
)
from kvferry.observe import FIRST_EVENTS, RequestTrace, StoredChunks
from kvferry.tiers import TIERS
from kvferry.tools.explain.client import EngineTrace
from kvferry.tools.report import report_width, wrapped

_INDENT = 2
# Columns of the times at the left.
_TIMES = 11


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """One sentence of the timeline that describes a request."""

    text: str
    # Seconds from the request's arrival to the event; None if the sentence continues the description of an
    # event, or gives the number of events that were not recorded.
    after: float | None = None


def timeline(trace: RequestTrace) -> list[TimelineEntry]:
    """Describe the trace of a request, which must begin with its arrival, in sentences by time."""
    return list(_Timeline(trace).lines())


class _Timeline:
    """Writer of the timeline of one trace. A sentence about an event can depend on earlier events."""

    def __init__(self, trace: RequestTrace) -> None:
        self._trace, self._arrived_at = trace, trace.events[0].at
        self._settled = False
        self._failure = ""
        self._handlers: Mapping[type[RequestEvent], Callable[[Any], Iterator[str]]] = {
            events.Arrived: _arrived,
            events.SourcesAsked: self._asked,
            events.LoadBegan: self._load_began,
            events.LoadEnded: self._load_ended,
            events.SourceRefused: self._refused,
            events.Scheduled: self._scheduled,
            events.Finished: lambda _: iter(("The request has ended.",)),
            events.Hinted: lambda event: iter((f"Hint {_words(event.hint)}: {event.detail}",)),
            events.LeaseGranted: self._lease_granted,
            events.LeaseEnded: self._lease_ended,
        }

    def lines(self) -> Iterator[TimelineEntry]:
        for number, event in enumerate(self._trace.events):
            if number == FIRST_EVENTS and self._trace.left_out:
                yield TimelineEntry(f"... {counted(self._trace.left_out, 'event')} not remembered ...")
            after: float | None = event.at - self._arrived_at
            for text in self._handlers[type(event)](event):
                yield TimelineEntry(text, after)
                after = None
        for stored in self._trace.stored:
            yield TimelineEntry(_stored(stored), stored.first - self._arrived_at)
            for tier, reason, number in stored.declined:
                chunks = _number(number, "chunk")
                yield TimelineEntry(f"Not written to {tier}: {chunks} of {stored.group} ({reason}).")

    def _asked(self, event: events.SourcesAsked) -> Iterator[str]:
        yield from self._again()
        if event.local_tokens:
            usable = f" Without a load it can use {format_count(event.resumable_tokens)} of them."
            lacks = usable if event.resumable_tokens < event.local_tokens else ""
            yield f"The engine's own cache has {_tokens(event.local_tokens)}.{lacks}"
        for one in event.bids:
            if one.excluded:
                yield f"{one.source} is not asked again: {one.excluded}"
                continue
            looking = "is still looking for at most" if one.bid.looking else "bids"
            bid = f"{_tokens(one.bid.tokens)} ({_origins(one.bid.parts)}), worth {one.value:.4g}"
            yield f"{one.source} {looking} {bid}."
        if event.compute_value:
            yield f"Computing everything is worth {event.compute_value:.4g}."
        for source_miss in event.misses:
            yield f"{source_miss.source} bids nothing, {_describe_miss(source_miss)}"
        chosen = next((one.source for one in event.bids if one.bid == event.chosen), "")
        if event.chosen is None:
            yield f"{'The rest' if event.resumable_tokens else 'Everything'} is computed: {event.why}."
        elif event.why is DecisionReason.LOOKING:
            yield f"The request waits for {chosen}: {event.why}."
        else:
            yield f"{chosen} is chosen: {event.why}."

    def _load_began(self, event: events.LoadBegan) -> Iterator[str]:
        yield from self._again()
        yield f"Loading tokens {event.begin} to {event.end - 1}: {_origins(event.parts)}."
        if event.peer != event.source:
            yield f"The {event.source} is {event.peer}"

    def _load_ended(self, event: events.LoadEnded) -> Iterator[str]:
        took = format_seconds(event.seconds)
        self._failure = event.failure
        if event.outcome is LoadOutcome.DROPPED:
            yield f"The load is dropped after {took}: {event.failure or 'the request ended first'}."
            return
        if event.outcome is not LoadOutcome.READY:
            what = "is given up at its deadline" if event.outcome is LoadOutcome.EXPIRED else "has failed"
            kind = f" ({_words(event.miss)})" if event.miss else ""
            yield f"The load {what} after {took}{kind}: {event.failure}"
            return
        figures = event.figures
        stages = (
            ("planning", figures.plan_seconds),
            ("reading", figures.transfer_seconds),
            ("checking", figures.check_seconds),
        )
        # Between these stages the load waits for a lane, for the peer, or for an engine step.
        waiting = event.seconds - sum(seconds for _, seconds in stages)
        times = [f"{format_seconds(seconds)} {name}" for name, seconds in stages if figures.transfer_seconds]
        times += [f"{format_seconds(max(0.0, waiting))} waiting"] if times else []
        yield f"Loaded in {took}{': ' if times else ''}{', '.join(times)}."
        for moved in event.moved:
            way = f", {moved.strategy}" if moved.strategy else ""
            yield f"{format_bytes(moved.size)} of {moved.group}{way}"
        if figures.pages:
            yield f"{_number(figures.pages, 'page')} in {_number(figures.descriptors, 'descriptor')}"
        if figures.read_bytes_per_second:
            speed = f"READs of this peer were measured at {figures.read_bytes_per_second / 1e9:.2g} GB/s"
            lacks = f"; its host memory cannot be mapped: {figures.not_shared}" if figures.not_shared else ""
            yield f"{speed}{lacks}"

    def _refused(self, event: events.SourceRefused) -> Iterator[str]:
        if event.source == TIERS:
            return  # only the failed chunks are not asked for again, and the failure is described already
        # The failure just before has said it.
        because = "" if event.reason == self._failure else f": {event.reason}"
        yield f"{event.source} is not asked again for this request{because}"

    def _scheduled(self, event: events.Scheduled) -> Iterator[str]:
        self._settled = True
        rest = event.tokens - event.cached_tokens
        if event.other_connector_tokens:
            yield f"Another connector of the engine loaded {_tokens(event.other_connector_tokens)}."
        yield f"Scheduled: {_tokens(event.cached_tokens)} cached, {format_count(rest)} to compute."

    def _lease_granted(self, event: events.LeaseGranted) -> Iterator[str]:
        if event.turn:
            yield f"Blocks of {_tokens(event.tokens)} are kept for the next turn, for {event.seconds:g} s."
            return
        yield (
            f"{_tokens(event.tokens)} are offered to another engine; the lease ends {event.seconds:g} s "
            "after its consumer's last heartbeat."
        )

    def _lease_ended(self, event: events.LeaseEnded) -> Iterator[str]:
        heard = self._trace.heartbeats
        if event.granted.turn:
            yield f"The blocks are given back{f' after {_heartbeats(heard)} of readers' if heard else ''}."
        elif event.withdrawn:
            yield "The lease is withdrawn: the cache was reset, or another sample of the request was aborted."
        elif not event.expired:
            # The first heartbeat came with the request.
            count = f" after {_heartbeats(heard)}" if heard > 1 else ""
            yield f"The lease is released by its consumer{count}."
        elif heard:
            yield f"The lease has expired: its consumer stopped after {_heartbeats(heard)}."
        else:
            yield "The lease has expired: its consumer sent no heartbeat."

    def _again(self) -> Iterator[str]:
        """Yield a sentence saying that the request was preempted, if it was."""
        # What happens only before a request is scheduled has happened after: so it was preempted.
        if self._settled:
            self._settled = False
            yield "The request was preempted, and is admitted again."


def _arrived(event: events.Arrived) -> Iterator[str]:
    if event.tenant:
        yield f"Its tenant is {event.tenant} (digest {event.tenant_digest})."
    asked = ", ".join(event.sources)
    if asked:
        yield f"The request has {_tokens(event.tokens)}. Possible sources: {asked}."
    elif event.declined:
        yield f"The request has {_tokens(event.tokens)}."
    else:
        yield f"The request has {_tokens(event.tokens)}. No other engine offers them, so no source is asked."
    for source_miss in event.declined:
        yield f"{source_miss.source} cannot serve it, {_describe_miss(source_miss)}"


def _stored(stored: StoredChunks) -> str:
    chunks = counted(stored.ordered, "chunk")
    text = f"Stored {stored.done} of {chunks} of {stored.group}, {format_bytes(stored.size)}"
    if stored.done + stored.failed == stored.ordered:
        text += f", until {format_seconds(stored.last - stored.first)} later"
    else:
        text += f", {stored.ordered - stored.done - stored.failed} under way"
    return f"{text}; {stored.failed} failed: {stored.failure}" if stored.failed else f"{text}."


def _origins(parts: Iterable[PlaceTokens]) -> str:
    return ", ".join(f"{format_count(part.tokens)} from {part.place}" for part in parts)


def _describe_miss(source_miss: SourceMiss) -> str:
    return _words(source_miss.reason) + (f": {source_miss.detail}" if source_miss.detail else ".")


def _words(value: MissReason | HintKind) -> str:
    return str(value).replace("_", " ")


def _number(count: int, noun: str) -> str:
    return f"{format_count(count)} {plural(count, noun)}"


def _tokens(count: int) -> str:
    return _number(count, "token")


def _heartbeats(count: int) -> str:
    return _number(count, "heartbeat")


@dataclass(slots=True)
class Summary:
    """The key figures of a request, from its arrival until the engine first scheduled it."""

    tokens: int
    # Prompt tokens by the origin of their KV: the name of a tier, ``peer``, ``prefix cache``, ``another
    # connector`` or ``computed``; empty until the request is scheduled.
    tokens_by_origin: Counter[str] = field(default_factory=Counter)
    failed: int = 0
    seconds: float | None = None  # time from arrival to scheduling; None if the request is not scheduled yet
    # `loading`, `looking`: parts of it in which a load was under way, or a source was looking up the prompt.
    loading: float = 0.0
    looking: float = 0.0

    @property
    def queued(self) -> float:
        return max(0.0, (self.seconds or 0.0) - self.loading - self.looking)


def summary(trace: RequestTrace) -> Summary:
    """Compute the key figures of a request from its trace, which must begin with its arrival."""
    arrived = trace.events[0]
    assert isinstance(arrived, events.Arrived)  # noqa: S101 - by construction
    found, looks_since, loading = Summary(arrived.tokens), None, dict[str, float]()
    for event in trace.events:
        if (
            isinstance(event, events.SourcesAsked | events.LoadBegan | events.Scheduled)
            and looks_since is not None
        ):
            found.looking, looks_since = found.looking + event.at - looks_since, None
        if isinstance(event, events.SourcesAsked) and event.why is DecisionReason.LOOKING:
            looks_since = event.at
        elif isinstance(event, events.LoadEnded):
            attempt = event.began.attempt
            loading[attempt] = max(loading.get(attempt, 0.0), event.seconds)  # parts are loaded concurrently
            found.failed += event.outcome in {LoadOutcome.FAILED, LoadOutcome.EXPIRED}
        elif isinstance(event, events.Scheduled):
            found.seconds = event.at - arrived.at
            found.tokens_by_origin = _places(event)
            break
    found.loading = sum(loading.values())
    return found


def _places(scheduled: events.Scheduled) -> Counter[str]:
    tokens_by_origin: Counter[str] = Counter()
    for load in scheduled.loads:
        # The engine computes the last token, even if its KV was loaded.
        for part in trim_parts(load.parts, min(load.end, scheduled.cached_tokens) - load.begin):
            tokens_by_origin[part.place] += part.tokens
    here = scheduled.cached_tokens - scheduled.other_connector_tokens - tokens_by_origin.total()
    tokens_by_origin.update(
        {
            "prefix cache": max(0, here),
            "another connector": scheduled.other_connector_tokens,
            "computed": scheduled.tokens - scheduled.cached_tokens,
        }
    )
    # The plus drops origins of no token.
    return +tokens_by_origin


def render(traced: EngineTrace) -> str:
    """Render the trace of a request as text: its engine, a sentence per event, and its times."""
    engine = traced.engine
    arrived = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(traced.arrived))
    lines = [
        *wrapped(traced.trace.request_id, hanging=_INDENT),
        *wrapped(f"{_engine(traced)}, process {engine.pid}, {engine.model}; arrived {arrived} UTC", _INDENT),
    ]
    for line in timeline(traced.trace):
        lines += _line(line)
    if (times := _times(summary(traced.trace))) is not None:
        lines += wrapped(times, _INDENT)
    return "\n".join(lines)


def render_list(traced: Sequence[EngineTrace], now: float) -> str:
    """Render requests as text at `now`, in seconds since 1970. Without a terminal, each takes one line."""
    lines: list[str] = []
    for one in traced:
        found = summary(one.trace)
        origins = ", ".join(
            f"{format_count(n)} {_from(place)}" for place, n in found.tokens_by_origin.most_common()
        )
        if not origins:
            asked = getattr(one.trace.events[0], "sources", ())
            origins = "not scheduled yet" if asked else "no source was asked"
        failed = f"; {counted(found.failed, 'load')} failed" if found.failed else ""
        line = f"{format_age(now - one.arrived)} ago, {_engine(one)}, {_tokens(found.tokens)}: "
        if report_width() is None:
            lines += wrapped(f"{one.trace.request_id}  {line}{origins}{failed}")
        else:
            lines += wrapped(one.trace.request_id, hanging=_INDENT)
            lines += wrapped(f"{line}{origins}{failed}", _INDENT)
    return "\n".join(lines)


def _times(found: Summary) -> str | None:
    if found.seconds is None:
        return None
    parts = [(found.loading, "loading"), (found.looking, "waiting for a source"), (found.queued, "queued")]
    of = ", ".join(f"{format_seconds(seconds)} {what}" for seconds, what in parts if seconds)
    took = f"The engine scheduled the request {format_seconds(found.seconds)} after it arrived"
    return f"{took}{f': {of}' if of else ''}."


def _line(line: TimelineEntry) -> list[str]:
    after, first = line.after, ""
    if after is not None:
        first = f"+{after * 1e3:.1f} ms" if after < 1 else f"+{after:.2f} s"
    begin, *rest = wrapped(line.text, _TIMES + 2)
    return [f"{first:>{_TIMES}}{begin[_TIMES:]}", *rest]


def _from(place: str) -> str:
    if place == "computed":
        return place
    return f"from {'its own ' if place == 'prefix cache' else ''}{place}"


def _engine(traced: EngineTrace) -> str:
    engine = traced.engine
    role = "engine" if engine.role == "both" else f"{engine.role} engine"
    return f"{role}, connector {engine.connector}" if engine.connector else role
