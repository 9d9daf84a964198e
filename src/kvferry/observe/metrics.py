"""Definitions of kvferry's metrics: names, kinds, labels and help texts. `docs/metrics.md` explains them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, TypeAlias

PREFIX = "kvferry_"

# From a READ on one machine to a load that times out.
SECONDS = (
    0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Upper bounds of the histograms' buckets, in seconds."""


class MetricKind(StrEnum):
    """The kind of a Prometheus metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """The definition of a Prometheus metric."""

    name: str  # without the prefix ``kvferry_`` and, for counters, without ``_total``
    kind: MetricKind
    help_text: str
    # Those that kvferry sets, in the order in which their values are passed; without labels that vLLM and
    # Prometheus add.
    labels: tuple[str, ...] = ()


def _counter(name: str, help_text: str, *labels: str) -> Metric:
    return Metric(name, MetricKind.COUNTER, help_text, labels)


def _gauge(name: str, help_text: str, *labels: str) -> Metric:
    return Metric(name, MetricKind.GAUGE, help_text, labels)


def _histogram(name: str, help_text: str, *labels: str) -> Metric:
    return Metric(name, MetricKind.HISTOGRAM, help_text, labels)


_ALL = (
    _counter("queries", "Requests for which a source was asked for KV.", "source"),
    _counter("hits", "Requests for which a source loaded tokens.", "source"),
    _counter("hit_tokens", "Tokens that a source loaded, by the tier they came from.", "source", "tier"),
    _counter("misses", "Requests for which a source loaded nothing.", "source", "reason", "group"),
    _counter("tickets", "Requests that came with a ticket, by what became of it.", "outcome"),
    _counter("recomputed_tokens", "Tokens that were computed because their load failed.", "source"),
    _gauge("pending_loads", "Loads in flight.", "source"),
    _counter("loads", "Loads that have ended.", "source", "outcome"),
    _histogram("load_seconds", "Time of a successful load, until the slowest rank has reported.", "source"),
    _counter("load_bytes", "Bytes loaded, summed over all ranks.", "source", "group", "strategy"),
    _gauge("late_blocks", "Blocks that loads still hold after their deadline or their request has ended."),
    _histogram("transfer_seconds", "Time of a load from a peer, by stage, on the slowest rank.", "stage"),
    _gauge("read_bytes_per_second", "Measured speed of READs from the peer of the last load.", "strategy"),
    _counter("transfer_pages", "Pages loaded from peers."),
    _counter("transfer_descriptors", "Contiguous reads (descriptors) that loaded these pages from peers."),
    _gauge("tier_used_bytes", "Bytes in use in a tier, by all engines that share it.", "tier"),
    _gauge("tier_capacity_bytes", "Bytes that a tier may use.", "tier"),
    _gauge("tenant_used_bytes", "Bytes that a tenant uses in a tier.", "tier", "tenant"),
    _counter("tenant_evicted_chunks", "Chunks of a tenant evicted from a tier.", "tier", "tenant"),
    _counter("tenant_prompt_tokens", "Prompt tokens of requests that have sources, by tenant.", "tenant"),
    _counter("tenant_hit_tokens", "Tokens that sources loaded for a tenant, by the tier.", "tenant", "tier"),
    _gauge("tier_owed_chunks", "Chunks that are not yet written to a tier.", "tier"),
    _counter("tier_fetched_chunks", "Chunks that loads and prefetches read from a tier.", "tier"),
    _counter(
        "tier_missed_chunks", "Chunks that a load expected in a tier but could not read.", "tier", "reason"
    ),
    _counter("tier_stored_chunks", "Chunks stored to a tier.", "tier"),
    _counter("tier_stored_bytes", "Bytes of chunks stored to a tier.", "tier"),
    _counter("tier_dropped_chunks", "Chunks that were not stored to a tier.", "tier", "reason"),
    _counter("tier_declined_chunks", "Chunks that the admission filter kept from a tier.", "tier", "reason"),
    _counter("tier_evicted_chunks", "Chunks evicted from a tier to make room.", "tier"),
    _counter("tier_served_chunks", "Chunks that other engines were told to read here.", "tier"),
    _counter("tier_served_bytes", "Bytes of chunks that other engines were told to read here.", "tier"),
    _counter("tier_refused_chunks", "Chunks that other engines were told to read elsewhere.", "tier"),
    _histogram("tier_fetch_seconds", "Time to fetch one chunk from a tier.", "tier"),
    _histogram("tier_store_seconds", "Time to store one chunk to a tier.", "tier"),
    _counter("hints", "Hints of requests, by what became of them.", "hint", "outcome"),
    _gauge("retained_bytes", "Bytes in host memory that hints retain."),
    _gauge("fleet_info", "1 for the address at which other engines read host memory.", "address"),
    _gauge("first_snapshot_tokens", "First position of a snapshot for shared prefixes; 0 for none."),
    _gauge("snapshot_bytes", "Bytes of a snapshot of recurrent state in the tiers."),
    _gauge("leases", "Leases that keep blocks for other engines to read."),
    _counter("leases_granted", "Leases granted."),
    _counter("leases_ended", "Leases that have ended.", "outcome"),
)

# The names begin with `multi_`, because the children of a FerryMultiConnector have the others.
_MULTI = (
    _counter("multi_queries", "Requests for which a connector was asked, once per admission.", "connector"),
    _counter("multi_hits", "Requests that a connector was chosen to load.", "connector"),
    _counter("multi_hit_tokens", "Tokens that a connector was chosen to load.", "connector"),
    _counter(
        "multi_passed_over", "Requests for which a connector had tokens but was not chosen.", "connector"
    ),
    _counter(
        "multi_misses",
        "Requests for which a connector had no tokens, or did not answer in time.",
        "connector",
    ),
    _counter("multi_loads", "Loads by a connector that have ended.", "connector", "outcome"),
    _gauge("multi_pending_loads", "Loads by a connector that are in flight.", "connector"),
)

METRICS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _ALL})
"""Metrics of one connector, by name."""
MULTI: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _MULTI})
"""Metrics of the choice between several connectors, by name. `docs/multi.md` explains them."""


Series: TypeAlias = tuple[str, tuple[str, ...]]
"""Key of a series: name of a metric in `metrics.METRICS`, and the values of its labels."""


@dataclass(slots=True)
class MetricsDelta:
    """Changes of metrics in one engine step, by series. Mutable."""

    counters: Counter[Series] = field(default_factory=Counter)
    gauges: dict[Series, float] = field(default_factory=dict)
    samples: defaultdict[Series, list[float]] = field(default_factory=lambda: defaultdict(list))

    def __bool__(self) -> bool:
        return bool(self.counters or self.gauges or self.samples)

    def count(self, name: str, *labels: str, by: int = 1) -> None:
        """Increment a counter of `METRICS`, with its labels in the order of `Metric.labels`."""
        # A counter without increments would show up as a series of its own.
        if by:
            self.counters[name, labels] += by

    def set(self, name: str, *labels: str, to: float) -> None:
        self.gauges[name, labels] = to

    def sample(self, name: str, *labels: str, of: Iterable[float]) -> None:
        """Add observations to a histogram of `METRICS`, with its labels in the order of `Metric.labels`."""
        if seen := list(of):
            self.samples[name, labels] += seen

    def add(self, other: MetricsDelta) -> None:
        """Merge a later delta, which is not modified, into this one."""
        self.counters.update(other.counters)
        # The later value of a gauge is the current one.
        self.gauges.update(other.gauges)
        for series, seen in other.samples.items():
            self.samples[series] += seen

    def plain(self) -> dict[str, Any]:
        """Return the delta as JSON types, by ``counters``, ``gauges`` and ``samples``.

        Each is a list of [name, label values, change]: the increment, the current value or the observations.
        """
        return {
            "counters": [[name, list(labels), n] for (name, labels), n in self.counters.items()],
            "gauges": [[name, list(labels), n] for (name, labels), n in self.gauges.items()],
            "samples": [[name, list(labels), seen] for (name, labels), seen in self.samples.items()],
        }

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> MetricsDelta:
        found = cls()
        for name, labels, n in plain["counters"]:
            found.count(name, *labels, by=n)
        for name, labels, n in plain["gauges"]:
            found.set(name, *labels, to=n)
        for name, labels, seen in plain["samples"]:
            found.sample(name, *labels, of=seen)
        return found


COMMON = ("model_name", "engine")
"""Labels that vLLM adds to every metric, both its own and those of connectors."""
CONNECTOR = "connector"
"""Label that kvferry's metrics have in addition if an engine has several connectors."""

VLLM_PREFIX = "vllm:"

ROUTER_PREFIX = f"{PREFIX}router_"
"""Start of the names of metrics of `kvferry router`, which are on the router's own `/metrics`."""

_VLLM = (
    _gauge("num_requests_running", "Requests in the running batch."),
    _gauge("num_requests_waiting", "Requests that wait to be scheduled."),
    _gauge("kv_cache_usage_perc", "Used share of the engine's KV cache, from 0 to 1."),
    _counter("prompt_tokens", "Prompt tokens."),
    _counter("prompt_tokens_by_source", "Prompt tokens, by origin.", "source"),
    _counter("generation_tokens", "Generated tokens."),
    _histogram("time_to_first_token_seconds", "Time to first token, as the API server measures it."),
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
    _counter("requests", "Requests that have ended.", "outcome", "reason"),
    _gauge("active_requests", "Requests under way."),
    _counter("continued_streams", "Streams of failed decode engines that another one has gone on with."),
    _counter("hinted_requests", "Requests whose engine was told which others have a prefix of the prompt."),
    _gauge(
        "known_blocks",
        "Blocks that an engine has in host memory, by its KV events.",
        "url",
        "rank",
        "address",
    ),
    _counter("event_gaps", "Times that KV events of an engine were lost.", "url", "rank"),
    _gauge("engine_state", "1 for the state of an engine.", "role", "url", "state"),
    _gauge("engine_requests", "Requests that an engine works on.", "role", "url"),
    _histogram("first_byte_seconds", "Time to the first byte of an answer's body."),
    _histogram("request_seconds", "Time to the last byte of an answer."),
    _histogram("prefill_seconds", "Time until a prefill engine has answered."),
    _counter("received_bytes", "Bytes of bodies from callers."),
    _counter("sent_bytes", "Bytes of answers' bodies to callers."),
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
