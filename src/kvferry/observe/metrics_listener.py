"""Count the connector's events as metrics.

A source is a provider of KV, such as a peer or the tiers. A *query* of a source is counted once per request,
together with its hit or miss, when the engine first schedules the request. So queries always equal hits plus
misses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvferry.connector import events
from kvferry.connector.events import DecisionReason, Event, LoadOutcome, MissReason, SourceMiss
from kvferry.observe.metrics import MetricsDelta
from kvferry.tiers.names import HOST, PEER

_NOT_TAKEN = {DecisionReason.NO_ROOM: MissReason.NO_ROOM, DecisionReason.ATTEMPTS: MissReason.ATTEMPTS}


@dataclass(slots=True)
class _RequestCounts:
    """The history of a request, from which its hits, misses and recomputed tokens are counted. Mutable.

    An attempt is a set of loads, from one or two sources, that together load a prefix of the prompt. If a
    load fails, there may be another attempt.
    """

    sources: tuple[str, ...]
    ticket: bool = False
    tenant: str = ""  # label; empty if tenants are not told apart
    # Last event with the sources' answers for the request; None before the first such event.
    asked: events.SourcesAsked | None = None
    failed: dict[str, MissReason] = field(default_factory=dict)
    # Position after the last token that an attempt's loads cover, by attempt.
    until: dict[str, int] = field(default_factory=dict)
    # Largest `until` of the attempts in which a source failed, by source. Cleared when the request is
    # scheduled.
    lost: dict[str, int] = field(default_factory=dict)
    settled: bool = False  # True once the request was scheduled

    def source_miss(self, source: str) -> SourceMiss:
        """Return the reason why a source without a successful load did not load KV for the request."""
        if source in self.failed:
            return SourceMiss(source, self.failed[source])
        asked = self.asked
        if asked is None:
            return SourceMiss(source, MissReason.NOT_STORED)
        if own := [source_miss for source_miss in asked.misses if source_miss.source == source]:
            return own[0]
        bids = [one for one in asked.bids if one.source == source]
        if not bids:
            return SourceMiss(source, MissReason.NOT_STORED)
        if asked.why in _NOT_TAKEN:
            return SourceMiss(source, _NOT_TAKEN[asked.why])
        taken = max((one.value for one in asked.bids if one.bid is asked.chosen), default=asked.compute_value)
        # A source that still looked would have won with what it hoped to find.
        waited_for = all(one.bid.looking for one in bids) and max(one.value for one in bids) > taken
        return SourceMiss(source, MissReason.LOOKING if waited_for else MissReason.LOST_BID)


class MetricsListener:
    """Listener that turns the connector's events into changes of metrics. Not thread-safe."""

    def __init__(self) -> None:
        self._counted = MetricsDelta()
        self._requests: dict[str, _RequestCounts] = {}
        self._pending: Counter[str] = Counter()
        self._leases = 0
        self._handlers: Mapping[type[Event], Callable[[Any], None]] = {
            events.Arrived: self._arrived,
            events.SourcesAsked: self._asked,
            events.LoadBegan: self._load_began,
            events.LoadEnded: self._load_ended,
            events.Scheduled: self._scheduled,
            events.Finished: self._finished,
            events.StoreEnded: self._store_ended,
            events.Hinted: lambda event: self._counted.count("hints", event.hint, event.outcome),
            events.RetainedBytes: lambda event: self._counted.set("retained_bytes", to=event.size),
            events.LeaseGranted: self._lease_granted,
            events.LeaseEnded: self._lease_ended,
            events.TierChanged: self._tier_changed,
            events.SnapshotsPlaced: self._snapshots_placed,
            events.LateBlocks: self._late_blocks,
        }

    def __len__(self) -> int:
        """Number of requests that have not ended and have at least one source."""
        return len(self._requests)

    def __call__(self, event: Event) -> None:
        if (count := self._handlers.get(type(event))) is not None:
            count(event)

    @property
    def changed(self) -> bool:
        """True if any metric has changed since the last call of `take`."""
        return bool(self._counted)

    def take(self) -> MetricsDelta:
        """Return the changes of metrics since the last call of this method, and clear them."""
        taken, self._counted = self._counted, MetricsDelta()
        return taken

    def _arrived(self, event: events.Arrived) -> None:
        for source_miss in event.declined:
            self._miss(source_miss, ticket=event.ticket)
        if event.sources:
            self._requests[event.request_id] = _RequestCounts(event.sources, event.ticket, event.tenant)
            if event.tenant:
                self._counted.count("tenant_prompt_tokens", event.tenant, by=event.tokens)

    def _asked(self, event: events.SourcesAsked) -> None:
        if (request := self._requests.get(event.request_id)) is not None:
            request.asked = event

    def _load_began(self, event: events.LoadBegan) -> None:
        self._pending[event.source] += 1
        self._counted.set("pending_loads", event.source, to=self._pending[event.source])
        if (request := self._requests.get(event.request_id)) is not None:
            request.until[event.attempt] = max(event.end, request.until.get(event.attempt, 0))

    def _load_ended(self, event: events.LoadEnded) -> None:
        began, source, counted = event.began, event.began.source, self._counted
        self._pending[source] -= 1
        counted.set("pending_loads", source, to=self._pending[source])
        counted.count("loads", source, event.outcome)
        request = self._requests.get(event.request_id)
        if event.outcome is LoadOutcome.READY:
            self._moved(event)
        elif event.miss is not None and request is not None:
            request.failed[source] = event.miss
            until = request.until.get(began.attempt, began.end)
            request.lost[source] = max(until, request.lost.get(source, 0))

    def _moved(self, event: events.LoadEnded) -> None:
        counted, source, figures = self._counted, event.began.source, event.figures
        counted.sample("load_seconds", source, of=(event.seconds,))
        for moved in event.moved:
            counted.count("load_bytes", source, moved.group, moved.strategy, by=moved.size)
            if figures.read_bytes_per_second:
                counted.set("read_bytes_per_second", moved.strategy, to=figures.read_bytes_per_second)
        if figures.pages:
            counted.count("transfer_pages", by=figures.pages)
            counted.count("transfer_descriptors", by=figures.descriptors)
            counted.sample("transfer_seconds", "plan", of=(figures.plan_seconds,))
            counted.sample("transfer_seconds", "read", of=(figures.transfer_seconds,))
            counted.sample("transfer_seconds", "check", of=(figures.check_seconds,))

    def _scheduled(self, event: events.Scheduled) -> None:
        request = self._requests.get(event.request_id)
        if request is None:
            return
        if request.lost:
            # Without the failure, the engine would not compute the tokens before this position. Only the
            # source that was to bring most of them counts.
            source, total = max(request.lost.items(), key=lambda one: one[1])
            self._counted.count("recomputed_tokens", source, by=max(0, total - event.cached_tokens))
            request.lost.clear()
        # A request that was preempted is scheduled again, but counts once.
        if request.settled:
            return
        request.settled = True
        for source in request.sources:
            if loads := [load for load in event.loads if load.source == source]:
                self._hit(source, loads, request)
            else:
                self._miss(request.source_miss(source), ticket=request.ticket)
        # It holds all bids, and the request may run for a long time.
        request.asked = None

    def _hit(self, source: str, loads: list[events.LoadBegan], request: _RequestCounts) -> None:
        self._ended_ticket(source, "hit", ticket=request.ticket)
        self._counted.count("queries", source)
        self._counted.count("hits", source)
        for load in loads:
            for part in load.parts:
                self._counted.count("hit_tokens", source, part.place, by=part.tokens)
                if request.tenant:
                    self._counted.count("tenant_hit_tokens", request.tenant, part.place, by=part.tokens)

    def _miss(self, source_miss: SourceMiss, *, ticket: bool) -> None:
        self._ended_ticket(source_miss.source, source_miss.reason, ticket=ticket)
        self._counted.count("queries", source_miss.source)
        self._counted.count("misses", source_miss.source, source_miss.reason, source_miss.group)

    def _ended_ticket(self, source: str, outcome: str, *, ticket: bool) -> None:
        if ticket and source == PEER:
            self._counted.count("tickets", outcome)

    def _finished(self, event: events.Finished) -> None:
        self._requests.pop(event.request_id, None)

    def _store_ended(self, event: events.StoreEnded) -> None:
        if not event.failure:
            self._counted.sample("tier_store_seconds", HOST, of=(event.seconds,))

    def _lease_granted(self, _: events.LeaseGranted) -> None:
        self._leases += 1
        self._counted.count("leases_granted")
        self._counted.set("leases", to=self._leases)

    def _lease_ended(self, event: events.LeaseEnded) -> None:
        self._leases -= 1
        self._counted.count("leases_ended", "expired" if event.expired else "released")
        self._counted.set("leases", to=self._leases)

    def _snapshots_placed(self, event: events.SnapshotsPlaced) -> None:
        self._counted.set("first_snapshot_tokens", to=event.first_tokens)
        self._counted.set("snapshot_bytes", to=event.state_bytes)

    def _tier_changed(self, event: events.TierChanged) -> None:
        tier, counted = event.tier, self._counted
        for name, now in (
            ("tier_used_bytes", event.used),
            ("tier_capacity_bytes", event.capacity),
            ("tier_owed_chunks", event.owed),
        ):
            if now is not None:
                counted.set(name, tier, to=now)
        if event.address:
            counted.set("fleet_info", event.address, to=1)
        counted.count("tier_fetched_chunks", tier, by=event.fetched)
        counted.count("tier_stored_chunks", tier, by=event.stored)
        counted.count("tier_stored_bytes", tier, by=event.stored_bytes)
        counted.count("tier_served_chunks", tier, by=event.served)
        counted.count("tier_served_bytes", tier, by=event.served_bytes)
        counted.count("tier_refused_chunks", tier, by=event.refused)
        counted.count("tier_evicted_chunks", tier, by=event.evicted)
        for tenant, used, evicted in event.tenants:
            counted.set("tenant_used_bytes", tier, tenant, to=used)
            counted.count("tenant_evicted_chunks", tier, tenant, by=evicted)
        for reason, n in event.missed:
            counted.count("tier_missed_chunks", tier, reason, by=n)
        for reason, n in event.dropped:
            counted.count("tier_dropped_chunks", tier, reason, by=n)
        for reason, n in event.declined:
            counted.count("tier_declined_chunks", tier, reason, by=n)
        counted.sample("tier_fetch_seconds", tier, of=event.fetch_seconds)
        counted.sample("tier_store_seconds", tier, of=event.store_seconds)

    def _late_blocks(self, event: events.LateBlocks) -> None:
        self._counted.set("late_blocks", to=event.blocks)
