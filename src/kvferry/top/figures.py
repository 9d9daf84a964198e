"""What is to be known of an engine, or of several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.observe.events import LoadOutcome
from kvferry.top.quantile import quantile
from kvferry.top.values import Values


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of a histogram; None where nothing was timed."""

    median: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Values, name: str, **labels: str) -> Seconds:
        """Estimated."""
        buckets = values.buckets(name, **labels)
        return cls(quantile(0.5, buckets), quantile(0.99, buckets))


@dataclass(frozen=True, slots=True)
class Source:
    """What a source brought.

    Attributes:
        queries: requests that it was asked for.
        hits: those that it brought something.
        hit_rate: of those that had something to look for: not what the engine's own cache had. None of none.
        loads: that have ended, by outcome.
        load_bytes: brought.
        load_seconds: of loads that are ready.
    """

    queries: float
    hits: float
    hit_rate: float | None
    loads: Mapping[str, float]
    load_bytes: float
    load_seconds: Seconds


@dataclass(frozen=True, slots=True)
class Connector:
    """One of several in an engine, as the choice between them has it.

    Attributes:
        queries: requests that it was asked for: the sum of the next three.
        hits: those that it was chosen to load.
        passed_over: those that it had tokens of, and another was chosen, or nothing was loaded.
        misses: those that it had nothing of.
        hit_tokens: that it was to load.
        loads: that have ended, by outcome.
    """

    queries: float
    hits: float
    passed_over: float
    misses: float
    hit_tokens: float
    loads: Mapping[str, float]

    @property
    def hit_rate(self) -> float | None:
        """Of all that it was asked for."""
        return self.hits / self.queries if self.queries else None

    @property
    def failed(self) -> float:
        """Loads that were of no use."""
        return self.loads.get(LoadOutcome.FAILED, 0.0)


@dataclass(frozen=True, slots=True)
class Lacking:
    """Queries that a source brought nothing, for one reason."""

    source: str
    reason: str
    group: str
    count: float


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes of a KV cache group that loads brought."""

    source: str
    group: str
    strategy: str
    size: float


@dataclass(frozen=True, slots=True)
class TierFlow:
    """What went into a tier and out of it."""

    fetched_chunks: float
    stored_chunks: float
    stored_bytes: float
    evicted_chunks: float
    missed_chunks: Mapping[str, float]
    dropped_chunks: Mapping[str, float]
    fetch_seconds: Seconds
    store_seconds: Seconds


@dataclass(frozen=True, slots=True)
class Flow:
    """What is counted: per second, or since the engines' start.

    Attributes:
        prompt_tokens, generated_tokens: of vLLM.
        tokens: of prompts, by where they come from: ``computed``, ``local`` (the engine's own cache), tiers;
            ``others``: what connectors brought that are not kvferry's, beside one of several that is.
        first_token_seconds: of vLLM.
        sources: by name.
        connectors: by name, where an engine has several.
        misses: most frequent first.
        moved: most bytes first.
        stages: seconds of loads from peers, by stage.
        pages_per_descriptor: what merging neighbours saves; None where nothing moved.
        descriptor_bytes: of loads from peers, the mean.
        tiers: by name.
        recomputed_tokens: bid by sources whose loads then failed.
        leases_granted, leases_released, leases_expired: of prompts for others.
    """

    prompt_tokens: float
    generated_tokens: float
    tokens: Mapping[str, float]
    first_token_seconds: Seconds
    sources: Mapping[str, Source]
    connectors: Mapping[str, Connector]
    misses: tuple[Lacking, ...]
    moved: tuple[Moved, ...]
    stages: Mapping[str, Seconds]
    pages_per_descriptor: float | None
    descriptor_bytes: float | None
    tiers: Mapping[str, TierFlow]
    recomputed_tokens: float
    leases_granted: float
    leases_released: float
    leases_expired: float

    @property
    def failed(self) -> dict[str, float]:
        """Loads of all sources that did not serve their request, by outcome."""
        ends = (LoadOutcome.FAILED, LoadOutcome.EXPIRED, LoadOutcome.DROPPED)
        return {end: sum(source.loads.get(end, 0.0) for source in self.sources.values()) for end in ends}


@dataclass(frozen=True, slots=True)
class Room:
    """How full a tier is; None where that is not told.

    Attributes:
        used, capacity: bytes.
        owed_chunks: that wait to be written to it.
    """

    used: float | None
    capacity: float | None
    owed_chunks: float | None

    @property
    def share(self) -> float:
        """Of its capacity, what is used; 0 where it is not known."""
        return self.used / self.capacity if self.used is not None and self.capacity else 0.0


@dataclass(frozen=True, slots=True)
class Levels:
    """What is so now.

    Attributes:
        running, waiting: requests.
        cache_usage: of the engine's own KV cache, up to 1; the fullest engine's.
        pending_loads: by source.
        pending_connectors: loads under way by connector, where an engine has several.
        late_blocks: held by loads past their deadline.
        leases: that hold blocks.
        tiers: by name; of several engines, or connectors of one, what the fullest of them says, since
            directories may be shared.
    """

    running: float
    waiting: float
    cache_usage: float
    pending_loads: Mapping[str, float]
    pending_connectors: Mapping[str, float]
    late_blocks: float
    leases: float
    tiers: Mapping[str, Room]


@dataclass(frozen=True, slots=True)
class Figures:
    """All of it.

    Attributes:
        levels: now.
        rates: per second since the reading before; None if there is none.
        totals: since the start.
    """

    levels: Levels
    rates: Flow | None
    totals: Flow
