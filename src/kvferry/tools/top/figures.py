"""The figures that `kvferry top` shows, of one engine or of several together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvferry.connector import LoadOutcome, MissReason
from kvferry.observe import CONNECTOR
from kvferry.tiers import PEER, TIER_KINDS, tier_kind
from kvferry.tools.top.exposition import Values, Window, quantile

_ASKED = "kvferry_multi_queries_total"
_PROMPTS_OF_TENANT = "kvferry_tenant_prompt_tokens_total"
# The names that `kvferry top` shows, by vLLM's.
_VLLM_SOURCES = {"local_compute": "computed", "local_cache_hit": "local"}


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
    """The queries and loads of a source of KV (``peer`` or ``tiers``), in total or per second."""

    # `queries`, `hits`: number of requests for which the source was queried, and for which it loaded KV.
    queries: float
    hits: float
    # Hits as a share of queries, from 0 to 1; None without queries. Queries for requests whose usable tokens
    # were all in the engine's own prefix cache do not count here.
    hit_rate: float | None
    loads: Mapping[str, float]  # number of ended loads, by outcome
    load_bytes: float
    load_seconds: Latency  # latency of successful loads


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorFigures:
    """The queries and loads of one of several connectors in an engine, in total or per second."""

    # Requests for which the connector was queried: the sum of `hits`, `passed_over` and `misses`.
    queries: float
    hits: float
    passed_over: float  # requests for which the connector had tokens but was not chosen
    misses: float  # requests for which the connector had no tokens, or did not answer in time
    hit_tokens: float
    loads: Mapping[str, float]  # number of ended loads, by outcome

    @property
    def hit_rate(self) -> float | None:
        """Hits as a share of the queries; None without queries."""
        return self.hits / self.queries if self.queries else None

    @property
    def failed(self) -> float:
        return self.loads.get(LoadOutcome.FAILED, 0.0)


@dataclass(frozen=True, slots=True)
class MissCount:
    """The number of misses of a source for one reason, in total or per second."""

    source: str
    reason: str  # one of `MissReason`
    group: str  # label of the KV cache group that lacked KV; empty if the reason does not concern a group
    count: float


@dataclass(frozen=True, slots=True)
class LoadedBytes:
    """The bytes, in total or per second, that a source loaded for one KV cache group by one method."""

    source: str
    group: str
    strategy: str
    size: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCounts:
    """The counts of chunks that a tier fetched, stored and evicted, in total or per second."""

    fetched_chunks: float
    stored_chunks: float
    stored_bytes: float
    evicted_chunks: float
    missed_chunks: Mapping[str, float]  # chunks that were requested but could not be fetched, by reason
    dropped_chunks: Mapping[str, float]  # chunks that should have been stored but were not, by reason
    declined_chunks: Mapping[str, float]  # chunks that the admission filter kept from the tier, by reason
    fetch_seconds: Latency
    store_seconds: Latency


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantCounts:
    """The tokens and evicted chunks of a tenant, in total or per second."""

    prompt_tokens: float
    hit_tokens: float  # tokens that were loaded for the tenant
    evicted_chunks: Mapping[str, float]  # by tier

    @property
    def hit_rate(self) -> float | None:
        """Loaded tokens as a share of the prompt tokens; None without prompts."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivityCounts:
    """The counts of tokens, requests, loads and leases, either per second or since the engines' start."""

    # `prompt_tokens`, `generated_tokens`, `first_token_seconds`: as vLLM counts them.
    prompt_tokens: float
    generated_tokens: float
    # Prompt tokens by origin: ``computed``, ``local`` (the engine's own prefix cache), the name of a tier, or
    # ``others`` (connectors that are not kvferry's).
    tokens: Mapping[str, float]
    first_token_seconds: Latency
    sources: Mapping[str, SourceFigures]
    # By the connector's name; empty if no engine has several connectors.
    connectors: Mapping[str, ConnectorFigures]
    misses: tuple[MissCount, ...]  # the most frequent first
    moved: tuple[LoadedBytes, ...]  # the largest first
    stages: Mapping[str, Latency]  # latency of loads from peers, by stage: ``plan``, ``read`` and ``check``
    # `pages_per_descriptor`, `descriptor_bytes`: means for loads from peers; None without loads.
    pages_per_descriptor: float | None
    descriptor_bytes: float | None
    tiers: Mapping[str, TierCounts]
    tenants: Mapping[str, TenantCounts]  # by label; empty if tenants do not share the tiers by weight
    recomputed_tokens: float  # tokens that were computed because their load failed
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
    """The current state of one engine, or of several together, from the metrics that are gauges."""

    running: float
    waiting: float
    # Used share of the engine's own KV cache, from 0 to 1; for several engines, the largest.
    cache_usage: float
    # `pending_loads`, `pending_connectors`: number of loads under way, by source and by connector.
    pending_loads: Mapping[str, float]
    pending_connectors: Mapping[str, float]
    late_blocks: float  # number of blocks held by loads past their deadline
    leases: float
    tiers: Mapping[str, TierUsage]  # usage by tier; for several engines, of the engine whose tier is fullest
    # Bytes in use by tenant and tier; for several engines, of the engine in which the tenant uses most.
    tenants: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Figures:
    """All figures of one engine or several: gauges, rates per second (None after one reading), totals."""

    levels: Gauges
    rates: ActivityCounts | None
    totals: ActivityCounts


def compute_figures(windows: list[Window]) -> Figures:
    """Compute the counts, rates and gauges of one engine, or of several combined, from their metrics."""
    several = Window.added(windows)
    rates = None if several.rates is None else _activity_counts(several.rates)
    return Figures(_gauges(several.now, [one.now for one in windows]), rates, _activity_counts(several.now))


def _activity_counts(values: Values) -> ActivityCounts:
    sources = {
        source for name in ("queries", "loads") for source in values.by(f"kvferry_{name}_total", "source")
    }
    pages = values.total("kvferry_transfer_pages_total")
    descriptors = values.total("kvferry_transfer_descriptors_total")
    ended = values.by("kvferry_leases_ended_total", "outcome")
    return ActivityCounts(
        prompt_tokens=values.total("vllm:prompt_tokens_total"),
        generated_tokens=values.total("vllm:generation_tokens_total"),
        tokens=_tokens(values),
        first_token_seconds=Latency.of(values, "vllm:time_to_first_token_seconds"),
        sources={source: _source(values, source) for source in sorted(sources)},
        connectors={name: _connector(values, name) for name in values.by(_ASKED, CONNECTOR)},
        misses=_miss_counts(values),
        moved=_loaded_bytes(values),
        stages={
            stage: Latency.of(values, "kvferry_transfer_seconds", stage=stage)
            for stage in values.by("kvferry_transfer_seconds_count", "stage")
        },
        pages_per_descriptor=pages / descriptors if descriptors else None,
        descriptor_bytes=(
            values.total("kvferry_load_bytes_total", source=PEER) / descriptors if descriptors else None
        ),
        tiers={tier: _tier(values, tier) for tier in _tiers(values)},
        tenants={tenant: _tenant(values, tenant) for tenant in values.by(_PROMPTS_OF_TENANT, "tenant")},
        recomputed_tokens=values.total("kvferry_recomputed_tokens_total"),
        leases_granted=values.total("kvferry_leases_granted_total"),
        leases_released=ended.get("released", 0.0),
        leases_expired=ended.get("expired", 0.0),
    )


def _miss_counts(values: Values) -> tuple[MissCount, ...]:
    of = values.by_all("kvferry_misses_total", "source", "reason", "group")
    found = [MissCount(source, reason, group, n) for (source, reason, group), n in of.items() if n]
    return tuple(sorted(found, key=lambda one: -one.count))


def _loaded_bytes(values: Values) -> tuple[LoadedBytes, ...]:
    of = values.by_all("kvferry_load_bytes_total", "source", "group", "strategy")
    found = [LoadedBytes(source, group, strategy, n) for (source, group, strategy), n in of.items() if n]
    return tuple(sorted(found, key=lambda one: -one.size))


def _tokens(values: Values) -> dict[str, float]:
    of = values.by("vllm:prompt_tokens_by_source_total", "source")
    own = {name: of[source] for source, name in _VLLM_SOURCES.items() if source in of}
    loaded = values.by("kvferry_hit_tokens_total", "tier")
    found = own | {tier: loaded[tier] for tier in _ordered(loaded)}
    # Connectors that are not kvferry's do not count their tokens, so what vLLM has from outside is compared.
    if values.by(_ASKED, CONNECTOR).keys() - values.by("kvferry_queries_total", CONNECTOR).keys():
        external = of.get("external_kv_transfer", 0.0)
        found["others"] = max(0.0, external - sum(loaded.values()))
    return found


def _source(values: Values, source: str) -> SourceFigures:
    queries = values.total("kvferry_queries_total", source=source)
    hits = values.total("kvferry_hits_total", source=source)
    # If all usable tokens are in the engine's own prefix cache, no source could have hit.
    looked = queries - values.total("kvferry_misses_total", source=source, reason=MissReason.LOCAL)
    return SourceFigures(
        queries=queries,
        hits=hits,
        hit_rate=hits / looked if looked > 0 else None,
        loads=values.by("kvferry_loads_total", "outcome", source=source),
        load_bytes=values.total("kvferry_load_bytes_total", source=source),
        load_seconds=Latency.of(values, "kvferry_load_seconds", source=source),
    )


def _connector(values: Values, name: str) -> ConnectorFigures:
    def count(what: str) -> float:
        return values.total(f"kvferry_multi_{what}_total", connector=name)

    return ConnectorFigures(
        queries=count("queries"),
        hits=count("hits"),
        passed_over=count("passed_over"),
        misses=count("misses"),
        hit_tokens=count("hit_tokens"),
        loads=values.by("kvferry_multi_loads_total", "outcome", connector=name),
    )


def _tiers(values: Values) -> list[str]:
    told = (series for name, series in values.of.items() if name.startswith("kvferry_tier_"))
    return _ordered({dict(labels)["tier"] for series in told for labels in series})


def _ordered(tiers: Iterable[str]) -> list[str]:
    # The fastest kind first, as `TIER_KINDS` has them.
    return sorted(tiers, key=lambda name: (*(kind != tier_kind(name) for kind in TIER_KINDS), name))


def _tier(values: Values, tier: str) -> TierCounts:
    def count(what: str) -> float:
        return values.total(f"kvferry_tier_{what}_total", tier=tier)

    def by_reason(what: str) -> dict[str, float]:
        reasons = values.by(f"kvferry_tier_{what}_total", "reason", tier=tier)
        return {reason: n for reason, n in reasons.items() if n}

    return TierCounts(
        fetched_chunks=count("fetched_chunks"),
        stored_chunks=count("stored_chunks"),
        stored_bytes=count("stored_bytes"),
        evicted_chunks=count("evicted_chunks"),
        missed_chunks=by_reason("missed_chunks"),
        dropped_chunks=by_reason("dropped_chunks"),
        declined_chunks=by_reason("declined_chunks"),
        fetch_seconds=Latency.of(values, "kvferry_tier_fetch_seconds", tier=tier),
        store_seconds=Latency.of(values, "kvferry_tier_store_seconds", tier=tier),
    )


def _tenant(values: Values, tenant: str) -> TenantCounts:
    return TenantCounts(
        prompt_tokens=values.total(_PROMPTS_OF_TENANT, tenant=tenant),
        hit_tokens=values.total("kvferry_tenant_hit_tokens_total", tenant=tenant),
        evicted_chunks=values.by("kvferry_tenant_evicted_chunks_total", "tier", tenant=tenant),
    )


def _gauges(values: Values, each: list[Values]) -> Gauges:
    return Gauges(
        running=values.total("vllm:num_requests_running"),
        waiting=values.total("vllm:num_requests_waiting"),
        # The fullest engine is the one that needs attention.
        cache_usage=max((one.total("vllm:kv_cache_usage_perc") for one in each), default=0.0),
        pending_loads=values.by("kvferry_pending_loads", "source"),
        pending_connectors=values.by("kvferry_multi_pending_loads", CONNECTOR),
        late_blocks=values.total("kvferry_late_blocks"),
        leases=values.total("kvferry_leases"),
        tiers={tier: _fullest(tier, each) for tier in _tiers(values)},
        tenants=_most_used(each),
    )


def _most_used(each: list[Values]) -> dict[str, dict[str, float]]:
    most: dict[str, dict[str, float]] = {}
    for values in each:
        for (tenant, tier), used in values.by_all("kvferry_tenant_used_bytes", "tenant", "tier").items():
            by_tier = most.setdefault(tenant, {})
            by_tier[tier] = max(used, by_tier.get(tier, 0.0))
    return most


def _fullest(tier: str, each: list[Values]) -> TierUsage:
    usages = (usage for one in each for usage in _tier_usages(one, tier))
    # The reports are not added up: a tier may be a directory that several engines share.
    return max(usages, key=lambda usage: (usage.share, usage.used is not None, usage.owed_chunks is not None))


def _tier_usages(values: Values, tier: str) -> list[TierUsage]:
    used, capacity, owed = (
        values.by(f"kvferry_tier_{name}", CONNECTOR, tier=tier)
        for name in ("used_bytes", "capacity_bytes", "owed_chunks")
    )
    # With several connectors each reports a tier of its own by this name.
    told = used.keys() | capacity.keys() | owed.keys() or {""}
    return [TierUsage(used.get(one), capacity.get(one), owed.get(one)) for one in sorted(told)]
