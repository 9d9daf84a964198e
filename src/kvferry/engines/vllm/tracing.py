"""Export of request spans through vLLM's tracer, which exports them in a thread of its own."""

from __future__ import annotations

import time
from collections.abc import Callable

import kvferry
from kvferry.connector.stream import Listener
from kvferry.engines.vllm.compat.request_ids import external_id
from kvferry.engines.vllm.compat.spans import REQUEST_ID, trace_context
from kvferry.observe.spans import SpanListener, TraceSpan


def tracing() -> Listener:
    """Return an event listener that exports trace spans of requests. The engine must have tracing on."""
    return SpanListener(_exported())


def _exported() -> Callable[[TraceSpan], None]:
    from opentelemetry import trace  # noqa: PLC0415 - installed and needed only in an engine with tracing

    tracer = trace.get_tracer("kvferry", kvferry.__version__)

    def export(span: TraceSpan) -> None:
        zero = time.time_ns() - time.monotonic_ns()
        made = tracer.start_span(
            span.name,
            trace_context(dict(span.parent)),
            trace.SpanKind.INTERNAL,
            {REQUEST_ID: external_id(span.request_id), **span.attributes},
            start_time=zero + round(span.begin * 1e9),
        )
        if span.failure:
            made.set_status(trace.Status(trace.StatusCode.ERROR, span.failure))
        made.end(zero + round(span.end * 1e9))

    return export
