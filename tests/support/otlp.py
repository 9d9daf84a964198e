"""A collector of spans, as OpenTelemetry's exporters talk to one over gRPC."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import (
    trace_service_pb2 as messages,
    trace_service_pb2_grpc as service,
)


class Collector(service.TraceServiceServicer):
    """Keeps every span that it is sent.

    Attributes:
        url: where it listens.
        spans: as they came.
    """

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        service.add_TraceServiceServicer_to_server(self, self._server)
        self.url = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the service's name for it
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return messages.ExportTraceServiceResponse()

    def of(self, trace_id: bytes, *names: str, seconds: float = 30.0) -> dict[str, Any]:
        """Spans of a trace by their names, as soon as there is one of each of these."""
        until = time.monotonic() + seconds
        while True:
            found = {span.name: span for span in self.spans if span.trace_id == trace_id}
            if set(names) <= found.keys():
                return found
            assert time.monotonic() < until, f"only {sorted(found)} of {names} came"
            time.sleep(0.05)

    def close(self) -> None:
        self._server.stop(None)


def attributes(span: Any) -> dict[str, Any]:
    """Of a span, as plain values."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}
