"""Figures of one engine, or of several together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.connector.load_results import LoadOutcome
from kvferry.top.values import Values, quantile


@dataclass(frozen=True, slots=True)
class Latency:
    """Quantiles of a histogram in seconds; None without samples."""

    median: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Values, name: str, **labels: str) -> Latency:
        """Estimate the quantiles of a histogram."""
        buckets = values.buckets(name, **labels)
        return cls(quantile(0.5, buckets), quantile(0.99, buckets))


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFigures:
    """Queries and loads of a source.

    Attributes:
        queries: requests for which the source was asked.
        hits: requests that it served.
        hit_rate: share of queries whose tokens the engine did not have itself; None without such queries.
        loads: loads that ended, by outcome.
        load_bytes: bytes loaded.
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
    """Queries and loads of one of several connectors in an engine.

    Attributes:
        queries: requests for which it was asked; the sum of the next three.
        hits: requests that it was chosen to load.
        passed_over: requests of which it had tokens without being chosen.
        misses: requests of which it had no tokens.
        hit_tokens: tokens that it was chosen to load.
        loads: loads that ended, by outcome.
    """

    queries: float
    hits: float
    passed_over: float
    misses: float
    hit_tokens: float
    loads: Mapping[str, float]

    @property
    def hit_rate(self) -> float | None:
        """Return the share of hits among all queries; None without queries."""
        return self.hits / self.queries if self.queries else None

    @property
    def failed(self) -> float:
        """Return the number of failed loads."""
        return self.loads.get(LoadOutcome.FAILED, 0.0)


@dataclass(frozen=True, slots=True)
class MissCount:
    """Number of misses of a source for one reason."""

    source: str
    reason: str
    group: str
    count: float


@dataclass(frozen=True, slots=True)
class LoadedBytes:
    """Bytes loaded for a KV cache group."""

    source: str
    group: str
    strategy: str
    size: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCounts:
    """Chunks and bytes stored to and fetched from a tier."""

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
    """Counters, per second or since the engines' start.

    Attributes:
        prompt_tokens, generated_tokens: vLLM's counters.
        tokens: prompt tokens by origin: ``computed``, ``local`` (the engine's own cache), tiers, ``others``
            (connectors that are not kvferry's).
        first_token_seconds: vLLM's time to first token.
        sources: figures by source.
        connectors: figures by connector, if an engine has several.
        misses: misses, the most frequent first.
        moved: loaded bytes by group, the most first.
        stages: latency of loads from peers, by stage.
        pages_per_descriptor: mean number of pages merged into a descriptor; None without loads.
        descriptor_bytes: mean size of descriptors of loads from peers.
        tiers: counts by tier.
        recomputed_tokens: tokens computed because a load failed.
        leases_granted, leases_released, leases_expired: number of leases on prompts.
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
        """Return the loads that did not serve their request, by outcome."""
        ends = (LoadOutcome.FAILED, LoadOutcome.EXPIRED, LoadOutcome.DROPPED)
        return {end: sum(source.loads.get(end, 0.0) for source in self.sources.values()) for end in ends}


@dataclass(frozen=True, slots=True)
class TierUsage:
    """Usage of a tier; None where unknown.

    Attributes:
        used, capacity: used bytes and capacity in bytes.
        owed_chunks: number of chunks that wait to be written to it.
    """

    used: float | None
    capacity: float | None
    owed_chunks: float | None

    @property
    def share(self) -> float:
        """Return the used share of the capacity; 0 if unknown."""
        return self.used / self.capacity if self.used is not None and self.capacity else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """Current values.

    Attributes:
        running, waiting: number of requests.
        cache_usage: used share of the engine's own KV cache; of several engines, the fullest.
        pending_loads: loads under way, by source.
        pending_connectors: loads under way, by connector.
        late_blocks: blocks held by loads past their deadline.
        leases: leases that hold blocks.
        tiers: usage by tier. Directories may be shared, so the fullest of several engines is taken.
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
    """Current values, rates and totals.

    Attributes:
        levels: current values.
        rates: counters per second since the reading before; None after the first reading.
        totals: counters since the start.
    """

    levels: Gauges
    rates: ActivityCounts | None
    totals: ActivityCounts
