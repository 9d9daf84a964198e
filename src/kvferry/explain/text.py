"""Render traces and lists of requests as text for a terminal."""

from __future__ import annotations

import time

from kvferry.explain.client import EngineTrace
from kvferry.explain.summary import Summary, summary
from kvferry.explain.timeline import TimelineEntry, timeline
from kvferry.terminal import wrapped
from kvferry.units import format_age, format_count, format_seconds

_INDENT = 2
_TIMES = 11
"""Width of the time column."""


def render(told: EngineTrace) -> str:
    """Return the timeline of one request as text."""
    engine = told.answer.engine
    came = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(told.arrived))
    lines = [
        *wrapped(told.trace.request_id, hanging=_INDENT),
        *wrapped(f"{_engine(told)}, process {engine.pid}, {engine.model}; arrived {came} UTC", _INDENT),
    ]
    for line in timeline(told.trace):
        lines += _line(line)
    if (times := _times(summary(told.trace))) is not None:
        lines += wrapped(times, _INDENT)
    return "\n".join(lines)


def render_list(told: list[EngineTrace], now: float) -> str:
    """Return a list of requests, the latest last, in about two lines each. `now` is in seconds since 1970."""
    lines: list[str] = []
    for one in told:
        found = summary(one.trace)
        places = ", ".join(f"{format_count(n)} {_from(place)}" for place, n in found.places.most_common())
        if not places:
            places = "no source was asked" if _unasked(one) else "not scheduled yet"
        failed = f"; {found.failed} load{'s' * (found.failed > 1)} failed" if found.failed else ""
        said = f"{format_age(now - one.arrived)} ago, {_engine(one)}, {format_count(found.tokens)} tokens: "
        lines += wrapped(one.trace.request_id, hanging=_INDENT)
        lines += wrapped(f"{said}{places}{failed}", _INDENT)
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


def _engine(told: EngineTrace) -> str:
    engine = told.answer.engine
    role = "engine" if engine.role == "both" else f"{engine.role} engine"
    return f"{role}, connector {engine.connector}" if engine.connector else role


def _unasked(told: EngineTrace) -> bool:
    return not getattr(told.trace.events[0], "sources", ())
