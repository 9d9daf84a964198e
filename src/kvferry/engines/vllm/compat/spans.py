"""Tracing in vLLM: kvferry's spans go through vLLM's tracer, which exports them in a thread of its own."""

from __future__ import annotations

import time
from collections.abc import Callable

from vllm.config import VllmConfig
from vllm.tracing import SpanAttributes, extract_trace_context, is_tracing_available

import kvferry
from kvferry.connector.stream import Listener
from kvferry.engines.vllm.compat.request_ids import external_id
from kvferry.observe.spans import SpanListener, TraceSpan

# The same attribute, with the same id, as in vLLM's own spans, so that tools join them.
_REQUEST_ID: str = SpanAttributes.GEN_AI_REQUEST_ID


def is_traced(vllm_config: VllmConfig) -> bool:
    """Return True if the engine exports trace spans. OpenTelemetry then runs in the scheduler's process."""
    return vllm_config.observability_config.otlp_traces_endpoint is not None and is_tracing_available()


def tracing() -> Listener:
    """Return an event listener that exports trace spans of requests. The engine must have tracing on."""
    return SpanListener(_exported())


def _exported() -> Callable[[TraceSpan], None]:
    from opentelemetry import trace  # noqa: PLC0415 - installed and needed only in an engine with tracing

    tracer = trace.get_tracer("kvferry", kvferry.__version__)

    def export(span: TraceSpan) -> None:
        # Spans are in wall time, and the wall clock may be set while the engine runs.
        zero = time.time_ns() - time.monotonic_ns()
        made = tracer.start_span(
            span.name,
            extract_trace_context(dict(span.parent)),
            trace.SpanKind.INTERNAL,
            {_REQUEST_ID: external_id(span.request_id), **span.attributes},
            start_time=zero + round(span.begin * 1e9),
        )
        if span.failure:
            made.set_status(trace.Status(trace.StatusCode.ERROR, span.failure))
        made.end(zero + round(span.end * 1e9))

    return export
