"""Steps of an engine with tiers: they look only at requests, loads and tiers that have something to do."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from kvferry.connector import content
from kvferry.connector.config import ConnectorConfig
from kvferry.connector.engine import CacheGroup
from kvferry.connector.messages import StepOrders, StepReports, WorkerInfo
from kvferry.connector.scheduler import SchedulerHalf
from kvferry.connector.tiers import milestones, opening, storing
from kvferry.geometry import GroupKind
from kvferry.tiers.names import GetOutcome, PutOutcome
from kvferry.tools.models.layout import EngineShape, lay_out
from kvferry.tools.models.store import LayerCache
from kvferry.transport.messages import Facts, RankCard
from kvferry.transport.read_plan import Report
from support.block_pool import request
from support.fake_engine import FakeEngine
from support.models import attention, model, state
from support.slow_tiers import FakeTier, QueueByHand, answer, jobs_of
from support.stores import NAMESPACE

BLOCK, CHUNK, BLOCKS, STEPS, SEEDS = 4, 16, 900, 200, 4
RUNNING = 5
WINDOW = LayerCache(GroupKind.SLIDING, 12, attention().fields)
ATTENTION, HYBRID = (attention(), WINDOW), (attention(), state())


class EveryStep:
    """In place of `Milestones`: every request is due in every step that computes it."""

    def __init__(self):
        self.due, self.requests = {}, {}

    def set(self, request, tokens):
        self.requests[request.request_id] = request

    def forget(self, request_id):
        self.due.pop(request_id, None)
        self.requests.pop(request_id, None)

    def clear(self):
        self.due.clear()
        self.requests.clear()

    def count(self, step):
        self.due.update({name: one for name, one in self.requests.items() if name in step.tokens})


@contextmanager
def tiered(monkeypatch, stores, *, write_back=False, capacity="1MiB", **settings) -> Iterator[FakeEngine]:
    """An engine with host memory and a slow tier, whose `queue` a test answers."""
    (rank,) = lay_out(model(*stores), EngineShape(1, (len(stores),), BLOCK, "LBHNC", BLOCKS))
    groups = [
        CacheGroup(
            kind=group.kind,
            attention_span=group.attention_span,
            block_tokens=BLOCK,
            state_block_tokens=BLOCK if group.kind is GroupKind.STATE else 0,
            snapshot_tokens=BLOCK if group.kind is GroupKind.STATE else None,
        )
        for group in rank.groups
    ]
    engine = FakeEngine(groups, blocks=BLOCKS, steps_in_flight=2)

    def open_tiers(_, __, table, *unused):
        engine.queue = QueueByHand(
            FakeTier("file", table=table), engine.clock, writers=1, write_back=write_back
        )
        return [(engine.queue, 1.0)]

    monkeypatch.setattr(opening, "open_tiers", open_tiers)
    monkeypatch.setattr(content.secrets, "token_hex", lambda _: f"reset at {engine.clock.now}")
    config = ConnectorConfig(
        host="127.0.0.1",
        tiers=[{"type": "host", "capacity": capacity}, {"type": "file", "path": "/unused"}],
        chunk_tokens=CHUNK,
        transfer=True,
        **settings,
    )
    card = RankCard(rank, b"", 4096, 64, 1)
    engine.half = SchedulerHalf(
        engine.facts,
        config,
        [WorkerInfo(geometry=rank, card=card)],
        engine.pool,
        facts=lambda incarnation: Facts("e", incarnation, "test", {}),
        namespace=lambda _: NAMESPACE,
        events=engine.events,
        clock=engine.clock,
    )
    try:
        yield engine
    finally:
        engine.half.shutdown()


class Traffic:
    """Requests that come, wait, load, run, are preempted and end, and workers and a slow tier: at random."""

    def __init__(self, engine: FakeEngine, seed: int, *, shares: bool) -> None:
        self.engine, self.draw, self.shares = engine, random.Random(seed), shares
        self.waiting, self.loading, self.running = deque(), {}, {}
        self.tokens: dict[str, int] = {}
        self.ordered: list[tuple[str, str]] = []  # loads and stores under way, with their requests
        self.number = 0
        self.sampled: list[Any] = []

    def step(self, look: bool) -> tuple[StepOrders, dict[str, Any]]:
        """Run one step; return its orders, and all that can be seen of the state afterwards."""
        engine, half = self.engine, self.engine.half
        engine.clock.now += self.draw.choice([0.01, 0.01, 0.01, 0.6])
        self._come_and_go()
        self._admit()
        if look:
            half._look_at = 0.0
        work = list(self._scheduled())
        snapshots = [
            (one, end)
            for one, tokens, *_ in work
            if self.engine.facts.has_state
            and (end := one.num_computed_tokens + tokens) % CHUNK == 0
            and end <= one.num_tokens
        ]
        orders = engine.begin(*work, snapshots=snapshots)
        assert orders is not None
        # The tokens of a step become known while the next one runs.
        for one in self.sampled:
            one.all_token_ids = [*one.all_token_ids, self.number]
            one.num_tokens += 1
        self.sampled = [one for one, *_ in work if one.num_computed_tokens >= one.num_tokens]
        self.ordered += [(order.key, "store") for order in orders.stores]
        for part in orders.parts:
            if part.work is not None:
                self.ordered.append((part.work.key, "copy"))
            if part.ends:
                self.ordered.append((part.load, "load"))
        for key in orders.given_up:
            self.ordered.append((key, "load"))
        self._answer()
        half.step_done()
        return orders, self._seen()

    def _come_and_go(self) -> None:
        draw, engine = self.draw, self.engine
        if draw.random() < 0.1 and len(self.running) + len(self.waiting) < RUNNING:
            self.number += 1
            name = f"r{self.number}"
            first = draw.choice([0, 1000]) if self.shares else 10_000 * self.number
            prompt = list(range(first, first + draw.randint(1, 90)))
            one = request(name, prompt, shared_prefix_boundary=0, skip_reading_prefix_cache=not self.shares)
            one.needs_blocks, one.is_complete = True, False
            engine.arrive(one)
            self.waiting.append(one)
        if draw.random() < 0.04 and self.running:
            one = self.running.pop(draw.choice(sorted(self.running)))
            engine.preempt(one)
            one.needs_blocks = True
            self.waiting.appendleft(one)
        # Many requests end when the last token of a chunk has just become known.
        held = {**self.running, **self.loading}
        ending = [name for name, one in self.running.items() if one.num_tokens % CHUNK == 0]
        if held and draw.random() < (0.3 if ending else 0.03):
            name = draw.choice(sorted(ending or held))
            self.running.pop(name, None)
            self.loading.pop(name, None)
            engine.finish(held[name], is_complete=draw.random() < 0.8)
        if draw.random() < 0.01:
            engine.half.reset()

    def _admit(self) -> None:
        engine, half = self.engine, self.engine.half
        for one in list(self.waiting):
            tokens = half.admission.matched(one, 0)
            if tokens is None:
                continue
            half.place_snapshots(one, tokens)
            engine.allocate(one, tokens)
            self.waiting.remove(one)
            one.needs_blocks = False
            (self.loading if tokens else self.running)[one.request_id] = one
            self.tokens[one.request_id] = tokens

    def _scheduled(self) -> Iterator[tuple[Any, ...]]:
        for one in self.running.values():
            left = one.num_tokens - one.num_computed_tokens
            if left < 0 or self.draw.random() < 0.1:
                continue  # the step has no room for it, or its next token is not known
            if left > 1:
                yield one, min(left, self.draw.randint(1, 40))
            elif self.draw.random() < 0.1:
                yield one, 3, 2  # two drafts, which are refused
            else:
                yield one, 1

    def _answer(self) -> None:
        """Let some of the workers' copies and of the tier's reads and writes end."""
        draw, half = self.draw, self.engine.half
        reports, loads = StepReports(), half.admission.loads
        for key, what in [one for one in self.ordered if draw.random() < 0.3]:
            self.ordered.remove((key, what))
            failure = "made up" if draw.random() < 0.1 else None
            if what != "load" or (key in loads and loads[key].report is None):
                reports.reports[key] = Report(failure)
        ended = [loads[key].load.request_id for key in reports.reports if key in loads]
        if reports:
            half.take_reports(reports)
        for name in ended:
            self._loaded(name, ok=half.admission._states.get(name))
        for what, key, _ in jobs_of(self.engine.queue):
            if draw.random() < 0.3:
                good = GetOutcome.HIT if what == "read" else PutOutcome.STORED
                bad = GetOutcome.IO_ERROR if what == "read" else PutOutcome.IO_ERROR
                answer(self.engine.queue, what, key, good if draw.random() < 0.9 else bad)

    def _loaded(self, name: str, *, ok: Any) -> None:
        if (one := self.loading.pop(name, None)) is None:
            return
        if ok.phase.name == "FAILED":
            self.engine.free(one)
            one.needs_blocks = True
            self.waiting.appendleft(one)
            return
        one.num_computed_tokens = min(self.tokens[name], one.num_tokens - 1)
        self.running[name] = one

    def _seen(self) -> dict[str, Any]:
        engine, half = self.engine, self.engine.half
        requests = [*self.waiting, *self.loading.values(), *self.running.values()]
        half.events.release()  # a step that looks at all may do so earlier
        return {
            "metrics": engine.fold.take().plain(),
            "references": engine.pool.references,
            "owed": half._tiering.owed_chunks,
            "busy": half.busy,
            "written": sorted(engine.queue.tier.kept),
            "snapshots": [(one.request_id, one.snapshot_at) for one in requests],
            "found": [half._tiering.look_up(one) for one in requests],
        }


def plain(orders: StepOrders) -> StepOrders:
    """Orders that can be compared, with what counts of their loads."""
    loads = [(one.key, one.bid, one.span, [table.tolist() for table in one.tables]) for one in orders.loads]
    return replace(orders, loads=loads, quiet=False, arena=orders.arena is not None)


SETUPS = {
    "windows": (ATTENTION, {"shares": True}, {}),
    "write-back": (ATTENTION, {"shares": True}, {"write_back": True, "capacity": "128KiB"}),
    "little room": (ATTENTION, {"shares": True}, {"capacity": "128KiB"}),
    "state": (HYBRID, {"shares": False}, {"first_snapshot_tokens": CHUNK}),
}


@pytest.mark.parametrize("setup", SETUPS)
def test_a_step_that_looks_at_what_has_something_to_do_equals_one_that_looks_at_all(setup, monkeypatch):
    stores, traffic, settings = SETUPS[setup]
    quiet = stored = loaded = 0
    for seed in range(SEEDS):
        with tiered(monkeypatch, stores, **settings) as engine:
            requests = Traffic(engine, seed, **traffic)
            found = [requests.step(look=False) for _ in range(STEPS)]
            half = engine.half
            parts = half.admission, half._peering, half._tiering
            now = half.events.waiting, *(container for part in parts for container in part.agenda)
            assert [*map(id, half._agenda)] == [*map(id, now)], "a part has replaced its container"
        with monkeypatch.context() as patched:
            for module in (storing, milestones):
                patched.setattr(module, "Milestones", EveryStep)
            with tiered(monkeypatch, stores, **settings) as engine:
                requests = Traffic(engine, seed, **traffic)
                looked = [requests.step(look=True) for _ in range(STEPS)]
        assert not any(orders.quiet for orders, _ in looked)
        for number, ((orders, seen), (all_orders, all_seen)) in enumerate(zip(found, looked, strict=True)):
            assert (number, plain(orders)) == (number, plain(all_orders))
            differ = {what: (seen[what], all_seen[what]) for what in seen if seen[what] != all_seen[what]}
            assert (number, differ) == (number, {})
        quiet += sum(orders.quiet for orders, _ in found)
        stored += sum(len(orders.stores) for orders, _ in found)
        loaded += sum(len(orders.loads) for orders, _ in found)
    assert quiet > 50
    assert stored > 100
    assert loaded > 20 or not traffic["shares"]
