"""How fast a peer's memory can be read is measured once, by a clock of its own, and decides the method."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.geometry import GroupKind, Region
from kvferry.geometry.layout import EngineShape, lay_out
from kvferry.geometry.store import LayerCache, ModelCache, StoredField
from kvferry.planning.strategy import Costs, Strategy, choose_method, transfer_methods
from kvferry.planning.template import build_templates
from kvferry.transport.agent import ReadState
from kvferry.transport.read_speed import LEAST_BYTES, PATIENCE_SECONDS, ReadSpeed
from kvferry.transport.staging import UNIT_BYTES, StagingArea
from support.clock import Clock

COSTS = Costs()
SIZE = 2 << 20
KV = StoredField("kv", 2, 8, (("content", 256),))
RANKS = lay_out(
    ModelCache("m", (LayerCache(GroupKind.FULL, 0, (KV,)),)), EngineShape(1, (1,), 16, "BHLNC", 64)
)
(ROUTE,) = build_templates(RANKS, RANKS[0])[0].routes


class Transport:
    """Stands for an agent whose READs take `seconds` of the clock each."""

    def __init__(self, clock: Clock, *seconds: float) -> None:
        self.clock, self._seconds = clock, iter(seconds)
        self.lists, self.reads, self.until = 0, 0, 0.0
        self.fault: Exception | None = None
        self.failed = False

    def prepare(self, owner, region, rows):
        self.lists += 1
        return owner, rows

    def release_list(self, handle):
        self.lists -= 1

    def read(self, local, here, remote, there):
        if self.fault is not None:
            raise self.fault
        assert (local[0], remote[0]) == (None, "P")
        self.reads += 1
        return object()

    def post(self, handle):
        self.until = self.clock.now + next(self._seconds, float("inf"))

    def state(self, handle):
        if self.failed:
            return ReadState.FAILED
        return ReadState.DONE if self.clock.now >= self.until else ReadState.IN_FLIGHT

    def release(self, handle):
        self.reads -= 1


class World:
    """A peer whose READs take so long, on a machine that copies a byte in `copy_byte_seconds`."""

    def __init__(
        self, monkeypatch, *seconds: float, copy_byte_seconds=COSTS.copy_byte_seconds, room=8
    ) -> None:
        self.clock = Clock(100.0)
        self.agent = Transport(self.clock, *seconds)
        self.landing = StagingArea(room * UNIT_BYTES, Region(0, 1))

        def copy(target, source):
            self.clock.now += target.nbytes * copy_byte_seconds

        monkeypatch.setattr(np, "copyto", copy)

    def speed(self, size=SIZE, memory=64 << 20, costs=COSTS) -> ReadSpeed:
        return ReadSpeed(self.agent, "P", Region(1 << 40, memory), self.landing, size, costs, self.clock)

    def measured(self, **options) -> ReadSpeed:
        speed = self.speed(**options)
        while not speed.ended:
            speed.advance()
            if speed.in_flight:
                self.clock.now = max(self.clock.now, self.agent.until)
        assert (self.landing.used_units, self.agent.lists, self.agent.reads) == (0, 0, 0)
        return speed


def chosen(costs: Costs, *, shared: bool) -> Strategy:
    methods = transfer_methods(ROUTE, costs, 16 << 20, shared=shared)
    return methods[choose_method(methods, 256, costs)].strategy


@pytest.mark.parametrize(
    ("gigabytes_per_second", "strategy"),
    [(0.15, Strategy.SHARED), (1.5, Strategy.SHARED), (2.5, Strategy.DIRECT), (300.0, Strategy.DIRECT)],
)
def test_slow_reads_give_way_to_memory_that_both_map_and_fast_ones_stay(
    monkeypatch, gigabytes_per_second, strategy
):
    seconds = SIZE / (gigabytes_per_second * 1e9)
    speed = World(monkeypatch, 9.0, seconds, seconds * 3).measured()
    assert speed.bytes_per_second == pytest.approx(gigabytes_per_second * 1e9)
    assert chosen(speed.costs, shared=True) is strategy
    assert chosen(speed.costs, shared=False) is Strategy.DIRECT


def test_costs_that_are_about_right_are_kept(monkeypatch):
    for factor in (0.2, 1.0, 7.0):
        seconds = SIZE * COSTS.read_byte_seconds * factor
        assert World(monkeypatch, *[seconds] * 3).measured().costs is COSTS


def test_reads_that_are_slow_because_the_whole_machine_is_are_not_slow(monkeypatch):
    seconds = [SIZE * COSTS.read_byte_seconds * 20] * 3
    busy = World(monkeypatch, *seconds, copy_byte_seconds=COSTS.copy_byte_seconds * 5).measured()
    assert busy.costs is COSTS
    assert busy.bytes_per_second == pytest.approx(SIZE / seconds[0])


def test_copies_on_a_gpu_that_are_faster_than_host_memory_do_not_hide_slow_reads(monkeypatch):
    on_gpu = Costs(copy_byte_seconds=1e-12, read_byte_seconds=2e-11)
    speed = World(monkeypatch, *[SIZE / 0.5e9] * 3, copy_byte_seconds=1e-10).measured(costs=on_gpu)
    assert chosen(speed.costs, shared=True) is Strategy.SHARED


@pytest.mark.parametrize("options", [{"size": 0}, {"memory": LEAST_BYTES - 1}, {"size": LEAST_BYTES - 1}])
def test_too_little_memory_is_not_measured(monkeypatch, options):
    speed = World(monkeypatch).measured(**options)
    assert (speed.bytes_per_second, speed.costs) == (0.0, COSTS)


def test_without_room_to_land_nothing_is_measured(monkeypatch):
    world = World(monkeypatch)
    taken = world.landing.allocate(7, UNIT_BYTES)
    speed = world.speed()
    speed.advance()
    assert (speed.ended, speed.pending) == (True, False)
    world.landing.free(taken)


@pytest.mark.parametrize("when", ["created", "read"])
def test_a_peer_that_cannot_be_read_is_not_measured(monkeypatch, when):
    world = World(monkeypatch, 1e-3)
    world.agent.fault = RuntimeError("no route") if when == "created" else None
    world.agent.failed = when == "read"
    speed = world.measured()
    assert (speed.bytes_per_second, speed.costs) == (0.0, COSTS)


def test_orders_wait_for_a_peer_that_does_not_answer_for_a_second_only(monkeypatch):
    world = World(monkeypatch)
    speed = world.speed()
    speed.advance()
    assert speed.in_flight
    world.clock.now += PATIENCE_SECONDS * 0.99
    assert speed.pending
    world.clock.now += PATIENCE_SECONDS * 0.02
    speed.advance()
    assert (speed.pending, speed.in_flight, speed.ended) == (False, True, False)
