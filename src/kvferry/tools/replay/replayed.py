"""The outcome of a simulation without its caches: sums over requests, and by tier, engine and tenant."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from math import ceil, exp, log

from kvferry.tiers import TenantUsage
from kvferry.tools.replay.engine import Hit
from kvferry.tools.replay.lookup import TierCounts
from kvferry.tools.replay.settings import ReplaySettings, ServedModel
from kvferry.tools.replay.trace.base import TraceRequest

# Classes of times are 2 % wide, so memory is bounded and quantiles are at most 1 % off.
_STEP = log(1.02)
_LEAST_SECONDS = 1e-6


class Times:
    """A histogram of times in seconds.

    >>> times = Times()
    >>> for number in range(1, 101):
    ...     times.add(number)
    >>> round(times.quantile(0.5)), round(times.mean, 1), len(times)
    (50, 50.5, 100)
    """

    def __init__(self) -> None:
        self._classes: Counter[int] = Counter()
        self._sum, self._count = 0.0, 0

    def __len__(self) -> int:
        return self._count

    def add(self, seconds: float) -> None:
        """Add a time. Times below a microsecond count as a microsecond."""
        self._classes[round(log(max(seconds, _LEAST_SECONDS)) / _STEP)] += 1
        self._sum += seconds
        self._count += 1

    @property
    def mean(self) -> float:
        return self._sum / self._count if self._count else 0.0

    def quantile(self, share: float) -> float:
        """Return the time in seconds that a share (0 to 1) of all times does not exceed; 0 without times."""
        left = max(ceil(share * self._count), 1)
        for number in sorted(self._classes):
            left -= self._classes[number]
            if left <= 0:
                return exp(number * _STEP)
        return 0.0


@dataclass(slots=True)
class TenantResults:
    """Sums over the counted requests of a tenant, or of all that have one label."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / max(self.prompt_tokens, 1)


@dataclass(slots=True, kw_only=True)
class Results:
    """Sums over the counted requests of a replay. Tokens are tokens of prompts."""

    tier_tokens: list[int]  # tokens that each tier provided, host memory first
    tier_bytes: list[int]
    group_tokens: list[int]  # tokens of the longest prefix that each group alone could use
    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    local_tokens: int = 0  # tokens that engines had in their own prefix caches
    # Tokens whose full-attention KV was at hand, but that were computed again because a window or a snapshot
    # was missing at their end.
    lost_tokens: int = 0
    # `units`, `unit_hits`: number of units of the trace in all prompts, and of those that were not computed.
    units: int = 0
    unit_hits: int = 0
    # `first_arrival`, `last_arrival`: seconds from the start of the trace to the first and the last counted
    # arrival.
    first_arrival: float = 0.0
    last_arrival: float = 0.0
    waits: Times = field(default_factory=Times)  # times from arrival to the first token
    # The same if the engines had no tiers. Empty if requests arrived when others had ended, because without
    # tiers they would have arrived later.
    waits_without_tiers: Times = field(default_factory=Times)
    # By label; without ``--tenants``, by the names in the trace. Empty if the trace names no tenants.
    by_tenant: dict[str, TenantResults] = field(default_factory=partial(defaultdict, TenantResults))

    @property
    def seconds(self) -> float:
        return self.last_arrival - self.first_arrival

    @property
    def hit_tokens(self) -> int:
        return self.local_tokens + sum(self.tier_tokens)

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were not computed; 0 without requests."""
        return self.hit_tokens / max(self.prompt_tokens, 1)

    @property
    def local_hit_rate(self) -> float:
        """Share of the prompt tokens that engines had in their own prefix caches; 0 without requests."""
        return self.local_tokens / max(self.prompt_tokens, 1)

    @property
    def tier_hit_rate(self) -> float:
        """Share of the prompt tokens that tiers provided; 0 without requests."""
        return sum(self.tier_tokens) / max(self.prompt_tokens, 1)

    @property
    def unit_hit_rate(self) -> float:
        """Share of the trace's units that were not computed; 0 without requests."""
        return self.unit_hits / self.units if self.units else 0.0

    def add(self, request: TraceRequest, hit: Hit) -> None:
        prompt, unit = request.prompt_tokens, request.unit_tokens
        found = hit.found
        if not self.requests:
            self.first_arrival = request.arrival
        self.last_arrival = request.arrival
        self.requests += 1
        self.prompt_tokens += prompt
        self.output_tokens += request.output_tokens
        self.local_tokens += hit.local_tokens
        self.lost_tokens += max(hit.attention_tokens - found, 0)
        # An incomplete last unit is a hit only if the whole prompt was found.
        self.units += -(-prompt // unit)
        self.unit_hits += -(-found // unit) if found == prompt else found // unit
        for number, tokens in enumerate(hit.tier_tokens):
            self.tier_tokens[number] += tokens
            self.tier_bytes[number] += hit.tier_bytes[number]
        for number, tokens in enumerate(hit.group_tokens):
            self.group_tokens[number] += tokens

    def add_tenant(self, label: str, request: TraceRequest, hit: Hit) -> None:
        found = self.by_tenant[label]
        found.requests += 1
        found.prompt_tokens += request.prompt_tokens
        found.hit_tokens += hit.found


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOutcome:
    """The outcome of a replay for one kind of tier, over all engines."""

    name: str
    # Capacity of one such tier in bytes; None for no limit, 0 if it stores nothing.
    capacity_bytes: int | None
    tiers: int  # number of such tiers: one per engine, or 1 if all engines share it
    hit_tokens: int
    # Numbers of chunks and bytes, over all such tiers. Requests that are not counted are included.
    counts: TierCounts
    group_counts: tuple[TierCounts, ...]
    # Usage by the labels of tenants; empty if they do not share the tier by weight.
    tenants: Mapping[str, TenantUsage]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutcome:
    """Sums over the counted requests of one engine, and the bytes that engines read from each other."""

    requests: int
    prompt_tokens: int
    hit_tokens: int
    read_bytes: int  # from the host memory of others
    sent_bytes: int  # read by others
    retained_bytes: int  # maximum bytes of host memory that were kept because of hints


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The outcome of a simulation that has ended or was interrupted."""

    model: ServedModel
    settings: ReplaySettings
    unit_tokens: int
    seconds: float  # from the first to the last arrival, also of requests that are not counted
    results: Results
    tiers: tuple[TierOutcome, ...]  # in the order of `ReplaySettings.tiers`
    engines: tuple[EngineOutcome, ...]
