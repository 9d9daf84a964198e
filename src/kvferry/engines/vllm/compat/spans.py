"""Tracing in vLLM, to which kvferry adds its spans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.tracing import SpanAttributes, extract_trace_context, is_tracing_available

REQUEST_ID: str = SpanAttributes.GEN_AI_REQUEST_ID
"""Name of the attribute for the request's id in vLLM's own spans."""


def is_traced(vllm_config: VllmConfig) -> bool:
    """Return True if the engine exports trace spans. OpenTelemetry then runs in the scheduler's process."""
    return vllm_config.observability_config.otlp_traces_endpoint is not None and is_tracing_available()


def trace_context(headers: Mapping[str, str]) -> Any:
    """Return the OpenTelemetry trace context in a request's headers; None if the headers contain none."""
    return extract_trace_context(headers)
