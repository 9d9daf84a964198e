"""Tracing in vLLM, which kvferry's spans join."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.tracing import SpanAttributes, extract_trace_context, is_tracing_available

REQUEST_ID: str = SpanAttributes.GEN_AI_REQUEST_ID
"""What vLLM's own span of a request calls its id."""


def is_traced(vllm_config: VllmConfig) -> bool:
    """Return True if the engine exports spans: vLLM has set up OpenTelemetry in the scheduler's process."""
    return vllm_config.observability_config.otlp_traces_endpoint is not None and is_tracing_available()


def trace_context(headers: Mapping[str, str]) -> Any:
    """Return the context that a request's headers name; None if they name none."""
    return extract_trace_context(headers)
