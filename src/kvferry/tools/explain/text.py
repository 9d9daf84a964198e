"""Rendering of traces, and of lists of requests, as text for a terminal."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from kvferry.connector import events
from kvferry.connector.bids import trim_parts
from kvferry.connector.events import DecisionReason
from kvferry.connector.load import LoadOutcome
from kvferry.tools.explain.client import EngineTrace
from kvferry.tools.explain.timeline import TimelineEntry, timeline
from kvferry.observe.traces import RequestTrace
from kvferry.terminal import report_width, wrapped
from kvferry.units import counted, format_age, format_count, format_seconds, plural


@dataclass(slots=True)
class Summary:
    """The key figures of a request, from its arrival until the engine first scheduled it.

    Attributes:
        tokens_by_origin: prompt tokens by the origin of their KV: the name of a tier, ``peer``,
            ``prefix cache``, ``another connector`` or ``computed``; empty until the request is scheduled.
        failed: number of failed loads.
        seconds: time from arrival to scheduling; None if the request is not scheduled yet.
        loading, looking: parts of it in which a load was under way, or a source was looking up the prompt.
    """

    tokens: int
    tokens_by_origin: Counter[str] = field(default_factory=Counter)
    failed: int = 0
    seconds: float | None = None
    loading: float = 0.0
    looking: float = 0.0

    @property
    def queued(self) -> float:
        """The rest of `seconds`; 0 if the request is not scheduled yet."""
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


_INDENT = 2
_TIMES = 11


def render(traced: EngineTrace) -> str:
    """Render the trace of a request as text: its engine, a sentence per event, and its times."""
    engine = traced.answer.engine
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


def render_list(traced: list[EngineTrace], now: float) -> str:
    """Render a list of requests as text, with about two lines per request, or one without a terminal.

    Args:
        now: seconds since 1970.
    """
    lines: list[str] = []
    for one in traced:
        found = summary(one.trace)
        origins = ", ".join(
            f"{format_count(n)} {_from(place)}" for place, n in found.tokens_by_origin.most_common()
        )
        if not origins:
            origins = "no source was asked" if _unasked(one) else "not scheduled yet"
        failed = f"; {counted(found.failed, 'load')} failed" if found.failed else ""
        tokens = f"{format_count(found.tokens)} {plural(found.tokens, 'token')}"
        line = f"{format_age(now - one.arrived)} ago, {_engine(one)}, {tokens}: "
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
    first = "" if line.after is None else f"+{_after(line.after)}"
    begin, *rest = wrapped(line.text, _TIMES + 2)
    return [f"{first:>{_TIMES}}{begin[_TIMES:]}", *rest]


def _after(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _from(place: str) -> str:
    if place == "computed":
        return place
    return f"from {'its own ' if place == 'prefix cache' else ''}{place}"


def _engine(traced: EngineTrace) -> str:
    engine = traced.answer.engine
    role = "engine" if engine.role == "both" else f"{engine.role} engine"
    return f"{role}, connector {engine.connector}" if engine.connector else role


def _unasked(traced: EngineTrace) -> bool:
    return not getattr(traced.trace.events[0], "sources", ())
