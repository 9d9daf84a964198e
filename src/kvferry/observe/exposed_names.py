"""Names of metrics on an engine's `/metrics`: kvferry's metrics, and those of vLLM that kvferry shows."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvferry.observe.metrics import METRICS, MULTI, PREFIX, Metric, MetricKind

COMMON = ("model_name", "engine")
"""Labels that vLLM adds to every metric, both its own and those of connectors."""
CONNECTOR = "connector"
"""Label that kvferry's metrics have in addition if an engine has several connectors."""

VLLM_PREFIX = "vllm:"

ROUTER_PREFIX = f"{PREFIX}router_"
"""Start of the names of metrics of `kvferry router`, which are on the router's own `/metrics`."""

_VLLM = (
    Metric("num_requests_running", MetricKind.GAUGE, "Requests in the running batch."),
    Metric("num_requests_waiting", MetricKind.GAUGE, "Requests that wait to be scheduled."),
    Metric("kv_cache_usage_perc", MetricKind.GAUGE, "Used share of the engine's KV cache, from 0 to 1."),
    Metric("prompt_tokens", MetricKind.COUNTER, "Prompt tokens."),
    Metric("prompt_tokens_by_source", MetricKind.COUNTER, "Prompt tokens, by origin.", ("source",)),
    Metric("generation_tokens", MetricKind.COUNTER, "Generated tokens."),
    Metric(
        "time_to_first_token_seconds",
        MetricKind.HISTOGRAM,
        "Time to first token, as the API server measures it.",
    ),
)


def exposed_name(metric: Metric, prefix: str = PREFIX) -> str:
    """Return the name that a metric has on `/metrics`, such as ``kvferry_loads_total``.

    For a histogram, the name has no suffix such as ``_bucket``.
    """
    # Prometheus clients add the suffix of a counter.
    return f"{prefix}{metric.name}{'_total' if metric.kind is MetricKind.COUNTER else ''}"


EXPOSED: Mapping[str, Metric] = MappingProxyType(
    {exposed_name(metric): metric for metric in (*METRICS.values(), *MULTI.values())}
    | {exposed_name(metric, VLLM_PREFIX): metric for metric in _VLLM}
)
"""Definitions of kvferry's metrics and of vLLM's metrics that kvferry shows, by name on `/metrics`."""

_ROUTER = (
    Metric("requests", MetricKind.COUNTER, "Requests that have ended.", ("outcome", "reason")),
    Metric("active_requests", MetricKind.GAUGE, "Requests under way."),
    Metric("engine_state", MetricKind.GAUGE, "1 for the state of an engine.", ("role", "url", "state")),
    Metric("engine_requests", MetricKind.GAUGE, "Requests that an engine works on.", ("role", "url")),
    Metric("first_byte_seconds", MetricKind.HISTOGRAM, "Time to the first byte of an answer's body."),
    Metric("request_seconds", MetricKind.HISTOGRAM, "Time to the last byte of an answer."),
    Metric("prefill_seconds", MetricKind.HISTOGRAM, "Time until a prefill engine has answered."),
    Metric("received_bytes", MetricKind.COUNTER, "Bytes of bodies from callers."),
    Metric("sent_bytes", MetricKind.COUNTER, "Bytes of answers' bodies to callers."),
)
ROUTER: Mapping[str, Metric] = MappingProxyType(
    {exposed_name(metric, ROUTER_PREFIX): metric for metric in _ROUTER}
)
"""Definitions of the metrics of `kvferry router`, by name on the router's `/metrics`."""

SUFFIXES = ("_bucket", "_sum", "_count")
"""Suffixes of the series of a histogram."""


def series_names(name: str) -> tuple[str, ...]:
    """Return the names that the series of a metric in `EXPOSED` have: one name, or three for a histogram."""
    return tuple(name + each for each in SUFFIXES) if EXPOSED[name].kind is MetricKind.HISTOGRAM else (name,)
