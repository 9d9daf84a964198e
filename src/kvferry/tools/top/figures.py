"""The figures that `kvferry top` shows, of one engine or of several together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.connector.load import LoadOutcome
from kvferry.tools.top.values import Values, quantile


@dataclass(frozen=True, slots=True)
class Latency:
    """The median and 99th percentile of a histogram of times, in seconds. Both are None without samples."""

    median: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Values, name: str, **labels: str) -> Latency:
        """Estimate both from a histogram's series with the given labels. `name` has no suffix ``_bucket``."""
        buckets = values.buckets(name, **labels)
        return cls(quantile(0.5, buckets), quantile(0.99, buckets))


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFigures:
    """The queries and loads of a source of KV (``peer`` or ``tiers``), in total or per second.

    Attributes:
        queries, hits: number of requests for which the source was queried, and for which it loaded KV.
        hit_rate: hits as a share of queries, from 0 to 1; None without queries. Queries for requests whose
            usable tokens were all in the engine's own prefix cache do not count here.
        loads: number of ended loads, by outcome.
        load_seconds: latency of successful loads.
    """

    queries: float
    hits: float
    hit_rate: float | None
    loads: Mapping[str, float]
    load_bytes: float
    load_seconds: Latency


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorFigures:
    """The queries and loads of one of several connectors in an engine, in total or per second.

    Attributes:
        queries: requests for which the connector was queried: the sum of `hits`, `passed_over` and `misses`.
        hits: requests for which the connector was chosen to load.
        passed_over: requests for which the connector had tokens but was not chosen.
        misses: requests for which the connector had no tokens, or did not answer in time.
        hit_tokens: tokens that the connector was chosen to load.
        loads: number of ended loads, by outcome.
    """

    queries: float
    hits: float
    passed_over: float
    misses: float
    hit_tokens: float
    loads: Mapping[str, float]

    @property
    def hit_rate(self) -> float | None:
        """Hits as a share of the queries; None without queries."""
        return self.hits / self.queries if self.queries else None

    @property
    def failed(self) -> float:
        return self.loads.get(LoadOutcome.FAILED, 0.0)


@dataclass(frozen=True, slots=True)
class MissCount:
    """The number of misses of a source for one reason, in total or per second.

    Attributes:
        reason: one of `MissReason`.
        group: label of the KV cache group that lacked KV; empty if the reason does not concern a group.
    """

    source: str
    reason: str
    group: str
    count: float


@dataclass(frozen=True, slots=True)
class LoadedBytes:
    """The bytes that a source loaded for one KV cache group with one transfer method.

    Attributes:
        size: number of bytes, in total or per second.
    """

    source: str
    group: str
    strategy: str
    size: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCounts:
    """The counts of chunks that a tier fetched, stored and evicted, in total or per second.

    Attributes:
        missed_chunks: chunks that were requested but could not be fetched, by reason.
        dropped_chunks: chunks that should have been stored but were not, by reason.
    """

    fetched_chunks: float
    stored_chunks: float
    stored_bytes: float
    evicted_chunks: float
    missed_chunks: Mapping[str, float]
    dropped_chunks: Mapping[str, float]
    fetch_seconds: Latency
    store_seconds: Latency


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivityCounts:
    """The counts of tokens, requests, loads and leases, either per second or since the engines' start.

    Attributes:
        prompt_tokens, generated_tokens, first_token_seconds: as vLLM counts them.
        tokens: prompt tokens by origin: ``computed``, ``local`` (the engine's own prefix cache), the name of
            a tier, or ``others`` (connectors that are not kvferry's).
        connectors: by the connector's name; empty if no engine has several connectors.
        misses: the most frequent first.
        moved: the largest first.
        stages: latency of loads from peers, by stage: ``plan``, ``read`` and ``check``.
        pages_per_descriptor, descriptor_bytes: means for loads from peers; None without loads.
        recomputed_tokens: tokens that were computed because their load failed.
    """

    prompt_tokens: float
    generated_tokens: float
    tokens: Mapping[str, float]
    first_token_seconds: Latency
    sources: Mapping[str, SourceFigures]
    connectors: Mapping[str, ConnectorFigures]
    misses: tuple[MissCount, ...]
    moved: tuple[LoadedBytes, ...]
    stages: Mapping[str, Latency]
    pages_per_descriptor: float | None
    descriptor_bytes: float | None
    tiers: Mapping[str, TierCounts]
    recomputed_tokens: float
    leases_granted: float
    leases_released: float
    leases_expired: float

    @property
    def failed(self) -> dict[str, float]:
        """Number of loads that failed, expired or were no longer needed, by outcome."""
        ends = (LoadOutcome.FAILED, LoadOutcome.EXPIRED, LoadOutcome.DROPPED)
        return {end: sum(source.loads.get(end, 0.0) for source in self.sources.values()) for end in ends}


@dataclass(frozen=True, slots=True)
class TierUsage:
    """The usage of a tier, in bytes and chunks that are still owed to it. None is unknown."""

    used: float | None
    capacity: float | None
    owed_chunks: float | None

    @property
    def share(self) -> float:
        """Used share of the capacity, up to 1; 0 if it is unknown."""
        return self.used / self.capacity if self.used is not None and self.capacity else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """The current state of one engine, or of several together, from the metrics that are gauges.

    Attributes:
        cache_usage: used share of the engine's own KV cache, from 0 to 1; for several engines, the largest.
        pending_loads, pending_connectors: number of loads under way, by source and by connector.
        late_blocks: number of blocks held by loads past their deadline.
        tiers: usage by tier; for several engines, of the engine whose tier is fullest.
    """

    running: float
    waiting: float
    cache_usage: float
    pending_loads: Mapping[str, float]
    pending_connectors: Mapping[str, float]
    late_blocks: float
    leases: float
    tiers: Mapping[str, TierUsage]


@dataclass(frozen=True, slots=True)
class Figures:
    """All figures that `kvferry top` shows for one engine, or for several together.

    Attributes:
        levels: current values of gauges.
        rates: counters per second between the last two readings; None after the first reading.
        totals: counters since the engines' start.
    """

    levels: Gauges
    rates: ActivityCounts | None
    totals: ActivityCounts
