"""Spans as OpenTelemetry has them."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvferry.connector.events import Arrived, LoadOutcome, MissReason
from kvferry.engines.vllm.compat.process import is_traced, tracing
from support.load_events import load_began, load_ended

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_load_that_failed_is_an_error_of_its_callers_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    provider, found = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(found))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    listener = tracing()
    now, name = time.monotonic(), "cmpl-a-0-12345678"
    listener(
        Arrived(
            name,
            now,
            tokens=9,
            sources=("peer",),
            declined=(),
            trace_headers=(("traceparent", f"00-{TRACE}-{PARENT}-01"),),
        )
    )
    listener(
        load_ended(
            load_began(f"{name}#1", end=9, at=now - 2, parts=()),
            outcome=LoadOutcome.FAILED,
            at=now - 1,
            miss=MissReason.CHECKSUM,
            failure="bytes differ",
        )
    )
    (span,) = found.get_finished_spans()
    assert (span.name, span.instrumentation_scope.name) == ("kvferry.load", "kvferry")
    assert (span.context.trace_id, span.parent.span_id) == (int(TRACE, 16), int(PARENT, 16))
    assert (span.status.status_code, span.status.description) == (trace.StatusCode.ERROR, "bytes differ")
    assert (span.attributes["gen_ai.request.id"], span.attributes["error.type"]) == ("cmpl-a-0", "checksum")
    assert span.end_time - span.start_time == pytest.approx(1e9, abs=1e6)
    assert 1e9 <= time.time_ns() - span.end_time < 60e9


@pytest.mark.parametrize(("endpoint", "traced"), [(None, False), ("http://127.0.0.1:1", True)])
def test_only_an_engine_with_an_endpoint_for_traces_is_traced(endpoint: str | None, traced: bool) -> None:
    config = SimpleNamespace(observability_config=SimpleNamespace(otlp_traces_endpoint=endpoint))
    assert is_traced(config) is traced
