"""A replay: engines serve the requests of a trace in order of arrival, each one request at a time.

An engine computes prompts one after the other. A request ends when its prompt is computed. Then others can
find its chunks, and the next turn of its session is scheduled. Without a speed
(`ReplaySettings.prefill_tokens_per_second` is 0), a request has ended before the next one arrives.

    arrival ─▶ route ─▶ queue of an engine ─▶ admit (look up, load) ─▶ compute ─▶ finish (store, keep blocks)
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from math import inf, isfinite
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.tiers import EVICTION_POLICIES, FLEET, EvictionPolicy, FairEviction, TenantUsage
from kvferry.tools.replay.arrivals import Arrivals, Arrived
from kvferry.tools.replay.content import tenant_digest
from kvferry.tools.replay.engine import EngineCache, Hit, Running, SimulatedEngine
from kvferry.tools.replay.fleet import FleetMemory, OthersMemory, SharedHostMemory
from kvferry.tools.replay.hinting import EngineHints
from kvferry.tools.replay.hints import ClientHints, SessionName, session_name
from kvferry.tools.replay.lookup import ReadableTier, SimulatedTier, TierCounts
from kvferry.tools.replay.replayed import EngineOutcome, Replayed, Results, TierOutcome, Times
from kvferry.tools.replay.settings import UNLIMITED, ReplaySettings, RouteName, ServedModel, TierSetting
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

    def replayed(self) -> Replayed:
        """Return the outcome so far."""
        return Replayed(
            model=self.model,
            settings=self.settings,
            unit_tokens=self.unit_tokens,
            seconds=self._last_arrival - self._first_arrival if self._first_arrival is not None else 0.0,
            results=self.results,
            tiers=tuple(map(self._tier_outcome, range(len(self.tiers)))),
            engines=tuple(map(self._engine_outcome, self.engines)),
        )

    def _tier_outcome(self, number: int) -> TierOutcome:
        setting, same = self.settings.tiers[number], self.tiers[number]
        groups = tuple(map(TierCounts.sum, zip(*(tier.counts for tier in same), strict=True)))
        usages: dict[str, list[TenantUsage]] = {}
        for tier in same:
            for label, usage in tier.tenants.items():
                usages.setdefault(label, []).append(usage)
        return TierOutcome(
            name=setting.kind,
            capacity_bytes=None if setting.capacity_bytes == UNLIMITED else setting.capacity_bytes,
            tiers=len(same),
            hit_tokens=self.results.tier_tokens[number],
            counts=TierCounts.sum(groups),
            group_counts=groups,
            tenants={
                label: TenantUsage(sum(one.used_bytes for one in each), sum(one.evicted for one in each))
                for label, each in usages.items()
            },
        )

    def _engine_outcome(self, engine: SimulatedEngine) -> EngineOutcome:
        fleet = self.fleet
        return EngineOutcome(
            requests=engine.requests,
            prompt_tokens=engine.prompt_tokens,
            hit_tokens=engine.hit_tokens,
            read_bytes=fleet.read_bytes[engine.number] if fleet else 0,
            sent_bytes=fleet.sent_bytes[engine.number] if fleet else 0,
            retained_bytes=engine.hints.most_retained if engine.hints else 0,
        )

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
