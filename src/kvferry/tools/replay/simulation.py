"""A replay: engines serve the requests of a trace in order of arrival, each one request at a time.

An engine computes prompts one after the other. The chunks of a request can be found by others when its prompt
is computed. Without a speed (`ReplaySettings.prefill_tokens_per_second` is 0), a request has ended before the
next one arrives.

    arrival ─▶ route ─▶ queue of an engine ─▶ admit (look up, load) ─▶ compute ─▶ finish (store, keep blocks)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush

from kvferry.tools.replay.content import in_batches
from kvferry.tools.replay.engine import Arrived, Hit, Running, SimulatedEngine
from kvferry.tools.replay.engine_cache import EngineCache
from kvferry.tools.replay.model import ServedModel
from kvferry.tools.replay.results import Results
from kvferry.tools.replay.routes import route_named
from kvferry.tools.replay.settings import ReplaySettings, TierSetting
from kvferry.tools.replay.tier import SimulatedTier
from kvferry.tools.replay.tiers import SimulatedTiers
from kvferry.tools.replay.trace.request import TraceRequest
from kvferry.tiers.eviction import EVICTION_POLICIES
from kvferry.tiers.names import HOST


class Simulation:
    """A replay in progress, at first with idle engines and empty caches.

    Attributes:
        unit_tokens: number of tokens per unit of the trace.
        tiers: all tiers of each kind, in the order of `ReplaySettings.tiers`. A shared tier appears once.
        results: sums over the requests so far.

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
        self.tiers: list[list[SimulatedTier]] = [[] for _ in settings.tiers]
        self.engines = [self._engine() for _ in range(settings.engines)]
        count = len(settings.tiers)
        self.results = Results(
            tier_tokens=[0] * count, tier_bytes=[0] * count, group_tokens=[0] * len(model.groups)
        )
        self._route = route_named(settings.route, settings.seed)
        self._seen = 0
        self._queues = [0] * settings.engines
        self._ends: list[tuple[float, int, int, Running]] = []
        self._free_without_tiers = [0.0] * settings.engines

    def run(self, requests: Iterable[TraceRequest]) -> Results:
        """Replay requests in the order of their arrival, and return the sums.

        If a KeyboardInterrupt or another exception ends the replay, `results` has the sums so far.
        """
        timed = self.settings.prefill_tokens_per_second > 0
        for batch in in_batches(requests):
            for arrived in self.engines[0].arrive(batch):
                request = arrived.request
                if timed:
                    self._end_until(request.arrival)
                number = self._route.choose(request, self._queues) if len(self.engines) > 1 else 0
                if timed:
                    self._queue(number, arrived)
                else:
                    engine = self.engines[number]
                    engine.finish(self._admit(engine, arrived))
        self._end_until(float("inf"))
        return self.results

    def _admit(self, engine: SimulatedEngine, arrived: Arrived) -> Running:
        running = engine.admit(arrived)
        self._seen += 1
        if self._seen > self.settings.skip:
            self.results.add(arrived.request, running.hit)
            if self._on_hit is not None:
                self._on_hit(arrived.request, running.hit)
        return running

    def _queue(self, number: int, arrived: Arrived) -> None:
        """Begin a request when it arrives, or let it wait for those that its engine has."""
        self._queues[number] += 1
        if self._queues[number] > 1:
            self.engines[number].waiting.append(arrived)
        else:
            self._begin(number, arrived, arrived.request.arrival)

    def _begin(self, number: int, arrived: Arrived, now: float) -> None:
        """Admit a request at a time of the trace, and schedule the end of its prefill."""
        running = self._admit(self.engines[number], arrived)
        end = now + self._seconds(running)
        self._add_waits(number, arrived.request, running, end, counted=self._seen > self.settings.skip)
        heappush(self._ends, (end, self._seen, number, running))

    def _end_until(self, now: float) -> None:
        """Finish the requests whose prefill ends by a time, and begin those that wait for their engines."""
        while self._ends and self._ends[0][0] <= now:
            at, _, number, running = heappop(self._ends)
            engine = self.engines[number]
            engine.finish(running)
            self._queues[number] -= 1
            if engine.waiting:
                self._begin(number, engine.waiting.popleft(), at)

    def _seconds(self, running: Running) -> float:
        """Return the time to load and to compute the prompt of an admitted request."""
        rate = self.settings.prefill_tokens_per_second
        speeds = (tier.bytes_per_second for tier in self.settings.tiers)
        # Tiers are read at the same time, and a part of the prompt is computed only after all loads.
        loading = max(size / speed for size, speed in zip(running.hit.tier_bytes, speeds, strict=True))
        prompt = running.arrived.request.prompt_tokens
        return loading + max(prompt - running.hit.found, 1) / rate

    def _add_waits(
        self, number: int, request: TraceRequest, running: Running, end: float, *, counted: bool
    ) -> None:
        """Add the time to the first token, with the tiers and as it would be without them."""
        computed = max(request.prompt_tokens - running.hit.local_tokens, 1)
        begin = max(self._free_without_tiers[number], request.arrival)
        free = begin + computed / self.settings.prefill_tokens_per_second
        # Also of requests that are not counted: the next ones wait for them.
        self._free_without_tiers[number] = free
        if counted:
            self.results.waits.add(end - request.arrival)
            self.results.waits_without_tiers.add(free - request.arrival)

    def _engine(self) -> SimulatedEngine:
        tiers = [self._tier(number, one) for number, one in enumerate(self.settings.tiers)]
        cache = EngineCache(self.model, self.settings.pool.blocks, self.unit_tokens)
        return SimulatedEngine(self.model, SimulatedTiers(self.model, tiers), cache)

    def _tier(self, number: int, setting: TierSetting) -> SimulatedTier:
        known = self.tiers[number]
        if setting.shared and known:
            return known[0]
        if setting.kind == HOST:
            sizes = [group.chunk_bytes for group in self.model.groups]
        else:
            # A file has a header and padding besides the chunk.
            sizes = [group.file_bytes for group in self.model.form.groups]
        # Storage evicts the least recently used chunks, whatever the policy of host memory is.
        policy = EVICTION_POLICIES[self.settings.policy if setting.kind == HOST else "lru"]
        known.append(SimulatedTier(setting.kind, setting.capacity_bytes, sizes, policy))
        return known[-1]
