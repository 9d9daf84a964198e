"""A replay: engines serve the requests of a trace in order of arrival, each one request at a time.

An engine computes prompts one after the other. A request ends when its prompt is computed. Then others can
find its chunks, and the next turn of its session is scheduled. Without a speed
(`ReplaySettings.prefill_tokens_per_second` is 0), a request has ended before the next one arrives.

    arrival ─▶ route ─▶ queue of an engine ─▶ admit (look up, load) ─▶ compute ─▶ finish (store, keep blocks)
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from math import ceil, exp, inf, isfinite, log
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.tiers import EVICTION_POLICIES, FLEET, EvictionPolicy, FairEviction
from kvferry.tools.replay.arrivals import Arrivals, Arrived
from kvferry.tools.replay.content import tenant_digest
from kvferry.tools.replay.engine import EngineCache, Hit, Running, SimulatedEngine
from kvferry.tools.replay.fleet import FleetMemory, OthersMemory, SharedHostMemory
from kvferry.tools.replay.hinting import EngineHints
from kvferry.tools.replay.hints import ClientHints, SessionName, session_name
from kvferry.tools.replay.lookup import ReadableTier, SimulatedTier
from kvferry.tools.replay.settings import ReplaySettings, RouteName, ServedModel, TierSetting
from kvferry.tools.replay.tiers import SimulatedTiers
from kvferry.tools.replay.trace.base import TraceRequest

# The route `prefix` remembers at most this many prefixes. The oldest half is then forgotten.
_MOST_PREFIXES = 1 << 22
# Share of a prompt that an engine must have served to be preferred: the default of vllm-router's policy
# ``cache_aware`` (``--cache-threshold``).
_LEAST_SHARE = 0.3
# Requests by which the queue of a preferred engine may be longer than the shortest queue.
_MOST_AHEAD = 4
# An engine of a replay computes fewer tokens than a number of so many bits can count.
_TOKEN_BITS = 44

# Classes of times are 2 % wide, so memory is bounded and quantiles are at most 1 % off.
_STEP = log(1.02)
_LEAST_SECONDS = 1e-6


# Numbers of requests that wait or run at each engine, int64 of shape (engines,).
Queues: TypeAlias = npt.NDArray[np.int64]
# Returns the index of the engine for a request.
Route: TypeAlias = Callable[[TraceRequest, Queues], int]


def _choose_by_session(request: TraceRequest, queues: Queues) -> int:
    first = int(request.prefix_ids[0]) if len(request.prefix_ids) else request.prompt_id
    seed = request.session or first
    return random.Random(seed).randrange(len(queues))  # noqa: S311 - a stable digest of the session


class _LeastBusyRoute:
    """Chooses the engine with the shortest queue, of several the one that got the fewest tokens so far."""

    def __init__(self, engines: int) -> None:
        self._tokens = np.zeros(engines, np.int64)

    def __call__(self, request: TraceRequest, queues: Queues) -> int:
        engine = self._shortest(queues)
        self._tokens[engine] += request.prompt_tokens
        return engine

    def _shortest(self, queues: Queues) -> int:
        # One number for both, because a comparison for each of 512 engines takes longer than a request.
        return int(((queues << _TOKEN_BITS) + self._tokens).argmin())


class _PrefixRoute(_LeastBusyRoute):
    """Chooses the engine that served the longest prefix of the prompt before.

    A prompt of which no engine served at least `_LEAST_SHARE` goes to the least busy engine.
    """

    def __init__(self, engines: int) -> None:
        super().__init__(engines)
        self._owners: dict[int, int] = {}

    def __call__(self, request: TraceRequest, queues: Queues) -> int:
        units = request.prompt_tokens // request.unit_tokens
        ids = request.prefix_ids[:units].tolist()
        shortest = self._shortest(queues)
        least = max(int(units * _LEAST_SHARE), 1)
        owner = next(
            (self._owners[one] for one in reversed(ids[least - 1 :]) if one in self._owners), shortest
        )
        # A long queue costs more time than the prefix saves.
        if queues[owner] - queues[shortest] >= _MOST_AHEAD:
            owner = shortest
        self._tokens[owner] += request.prompt_tokens
        self._owners.update(dict.fromkeys(ids, owner))
        if len(self._owners) > _MOST_PREFIXES:
            for old in list(self._owners)[: _MOST_PREFIXES // 2]:
                del self._owners[old]
        return owner


def route_named(name: RouteName, engines: int, seed: int) -> Route:
    """Return the route with a name. Random choices have a seed."""
    if name == "prefix":
        return _PrefixRoute(engines)
    if name == "least-busy":
        return _LeastBusyRoute(engines)
    if name == "session":
        return _choose_by_session
    chance = random.Random(seed)  # noqa: S311 - a simulation
    return lambda _, queues: chance.randrange(len(queues))


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


class Simulation:
    """A replay in progress, at first with idle engines and empty caches.

    Attributes:
        tiers: all tiers of each kind, in the order of `ReplaySettings.tiers`. A shared tier appears once.
        fleet: host memory of all engines, if they read each other's; else None.

    Args:
        on_hit: called with each counted request and what was found for it, when its engine has admitted it.
    """

    def __init__(
        self,
        model: ServedModel,
        settings: ReplaySettings,
        unit_tokens: int,
        on_hit: Callable[[TraceRequest, Hit], None] | None = None,
    ) -> None:
        self._on_hit = on_hit
        self.model, self.settings, self.unit_tokens = model, settings, unit_tokens
        self.tiers: list[list[ReadableTier]] = [[] for _ in settings.tiers]
        shares = any(tier.kind == FLEET for tier in settings.tiers)
        self.fleet = FleetMemory(settings.engines, settings.seed) if shares else None
        self.engines = [self._engine(number) for number in range(settings.engines)]
        count = len(settings.tiers)
        self.results = Results(
            tier_tokens=[0] * count, tier_bytes=[0] * count, group_tokens=[0] * len(model.groups)
        )
        self._route = route_named(settings.route, settings.engines, settings.seed)
        self._queues = np.zeros(settings.engines, np.int64)
        self._seen = 0
        self._first_arrival: float | None = None
        self._last_arrival = 0.0
        self._ends: list[tuple[float, int, SimulatedEngine, Running]] = []
        self._client_hints = None if settings.hints is None else ClientHints(settings.hints)
        self._lead_seconds = None if settings.hints is None else settings.hints.lead_seconds
        # (time, seconds until the session's next turn, session) of prefetches that will begin.
        self._prefetches: list[tuple[float, float, SessionName]] = []
        self._engine_of: dict[SessionName, SimulatedEngine] = {}  # engine of each session's last request

    @property
    def seconds(self) -> float:
        """Seconds from the first to the last arrival, also of requests that are not counted."""
        return 0.0 if self._first_arrival is None else self._last_arrival - self._first_arrival

    def run(self, requests: Iterable[TraceRequest]) -> Results:
        """Replay requests and all turns that follow them in the order of their arrival, and return the sums.

        If a KeyboardInterrupt or another exception ends the replay, `results` has the sums so far.
        """
        keys_of_each = self.engines[0].cache.keys_of_each
        arrivals = Arrivals(
            requests,
            keys_of_each,
            self.settings.concurrency,
            ahead_seconds=self._lead_seconds or 0.0,
            on_known=self._schedule_prefetch if self._lead_seconds else None,
        )
        try:
            while self._ends or isfinite(arrivals.time):
                end = self._ends[0][0] if self._ends else inf
                if self._prefetches and self._prefetches[0][0] < min(end, arrivals.time):
                    self._prefetch()
                elif end <= arrivals.time:
                    self._end(arrivals)
                else:
                    self._arrive(arrivals.pop())
        finally:
            if arrivals.depend_on_ends:
                self.results.waits_without_tiers = Times()
        return self.results

    def _arrive(self, arrived: Arrived) -> None:
        """Queue a request at the engine that the route chooses."""
        self._last_arrival = arrived.request.arrival
        if self._first_arrival is None:
            self._first_arrival = self._last_arrival
        number = self._route(arrived.request, self._queues) if len(self.engines) > 1 else 0
        engine = self.engines[number]
        engine.queue.append(arrived)
        self._queues[number] += 1
        if len(engine.queue) == 1:
            self._begin(engine, arrived.request.arrival)

    def _admit(self, engine: SimulatedEngine, arrived: Arrived) -> Running:
        running = engine.admit(arrived)
        self._seen += 1
        if self._seen > self.settings.skip:
            self.results.add(arrived.request, running.hit)
            if arrived.request.tenant or self.settings.tenants is not None:
                self.results.add_tenant(self._label(arrived.request), arrived.request, running.hit)
            engine.count(running)
            if self._on_hit is not None:
                self._on_hit(arrived.request, running.hit)
        return running

    def _begin(self, engine: SimulatedEngine, now: float) -> None:
        """Admit the first request of an engine's queue, and schedule the end of its prefill."""
        engine.set_time(now)
        request, running = engine.queue[0].request, self._admit(engine, engine.queue[0])
        seconds = self._prefill_seconds(engine, request, running.hit, now)
        heappush(self._ends, (now + seconds, self._seen, engine, running))

    def _prefill_seconds(self, engine: SimulatedEngine, request: TraceRequest, hit: Hit, now: float) -> float:
        """Return the time from the admission of a request to its first token, and count its waits."""
        if not (rate := self.settings.prefill_tokens_per_second):
            return 0.0
        # Tiers are read at the same time, and a part of the prompt is computed only after all loads.
        speeds = (tier.bytes_per_second for tier in self.settings.tiers)
        loading = max(size / speed for size, speed in zip(hit.tier_bytes, speeds, strict=True))
        seconds = loading + max(request.prompt_tokens - hit.found, 1) / rate
        # The same engine without tiers. Also for requests that are not counted: the next ones wait for them.
        begin = max(engine.free_without_tiers, request.arrival)
        free = begin + max(request.prompt_tokens - hit.local_tokens, 1) / rate
        engine.free_without_tiers = free
        if self._seen > self.settings.skip:
            self.results.waits.add(now + seconds - request.arrival)
            self.results.waits_without_tiers.add(free - request.arrival)
        return seconds

    def _end(self, arrivals: Arrivals) -> None:
        """End the prefill that ends next, and begin what waits for it."""
        now, _, engine, running = heappop(self._ends)
        engine.set_time(now)
        request = running.arrived.request
        engine.finish(running, None if self._client_hints is None else self._client_hints.of(request))
        if self._lead_seconds and (name := session_name(request)) is not None:
            self._engine_of[name] = engine
        engine.queue.popleft()
        self._queues[engine.number] -= 1
        arrivals.ended(running.arrived, now)
        if engine.queue:
            self._begin(engine, now)

    def _schedule_prefetch(self, now: float, at: float, request: TraceRequest) -> None:
        begin = max(now, at - (self._lead_seconds or 0.0))
        if begin < at and (name := session_name(request)) is not None:
            heappush(self._prefetches, (begin, at - begin, name))

    def _prefetch(self) -> None:
        now, seconds, name = heappop(self._prefetches)
        # No engine knows a session before the end of its first turn.
        if (engine := self._engine_of.get(name)) is not None and engine.hints is not None:
            engine.set_time(now)
            engine.hints.prefetch(name, seconds)

    def _label(self, request: TraceRequest) -> str:
        if self.settings.tenants is None:
            return request.tenant
        return self.settings.tenants.of(tenant_digest(request.tenant)).name

    def _engine(self, number: int) -> SimulatedEngine:
        host, *slow = self.settings.tiers
        memory = self._host(number, host)
        self.tiers[0].append(memory)
        slow_tiers = [self._slow_tier(at, one) for at, one in enumerate(slow, 1)]
        tiers = SimulatedTiers(memory, slow_tiers, self.settings.admission)
        cache = EngineCache(self.model, self.settings.pool.blocks, self.unit_tokens)
        engine = SimulatedEngine(number, self.model, tiers, cache)
        if (hints := self.settings.hints) is not None:
            speeds = [tier.bytes_per_second for tier in self.settings.tiers]
            engine.hints = EngineHints(self.model, tiers, hints, self.settings.tenants, speeds)
        return engine

    def _host(self, number: int, setting: TierSetting) -> SimulatedTier:
        sizes, policy = self._chunk_bytes, self._policy(self.settings.policy, setting, self._chunk_bytes)
        if self.fleet is None:
            return SimulatedTier(setting.capacity_bytes, sizes, policy)
        return SharedHostMemory(self.fleet, number, setting.capacity_bytes, sizes, policy)

    def _slow_tier(self, number: int, setting: TierSetting) -> ReadableTier:
        known = self.tiers[number]
        if setting.shared and known:
            return known[0]
        if setting.kind == FLEET:
            assert self.fleet is not None  # noqa: S101 - created for such a tier
            known.append(OthersMemory(self.fleet, len(known), self._chunk_bytes))
        else:
            # A file has a header and padding besides the chunk.
            sizes = [group.file_bytes for group in self.model.form.groups]
            # Storage evicts the least recently used chunks, whatever the policy of host memory is.
            per_day = self.settings.admission.write_per_day
            policy = self._policy("lru", setting, sizes)
            known.append(SimulatedTier(setting.capacity_bytes, sizes, policy, per_day))
        return known[-1]

    def _policy(
        self, name: str, setting: TierSetting, chunk_bytes: Sequence[int]
    ) -> Callable[[int], EvictionPolicy]:
        """Return what makes the eviction policy of a tier, shared by weight with ``--tenants``."""
        tenants, policy = self.settings.tenants, EVICTION_POLICIES[name]
        # Tenants share no bucket, as where requests are served.
        if tenants is None or setting.kind == "object":
            return policy
        tenants.check_limits(setting.kind, setting.capacity_bytes, max(chunk_bytes))
        return lambda capacity_bytes: FairEviction(capacity_bytes, policy, tenants, Counter())

    @property
    def _chunk_bytes(self) -> list[int]:
        return [group.chunk_bytes for group in self.model.groups]
