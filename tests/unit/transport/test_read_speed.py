"""How fast a peer's memory can be read is measured once, by a clock of its own, and decides the method."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.geometry import GroupKind, Region
from kvferry.planning.strategy import Costs, Strategy, choose_method, transfer_methods
from kvferry.planning.template import build_templates
from kvferry.tools.models.layout import EngineShape, lay_out
from kvferry.tools.models.store import LayerCache, ModelCache, StoredField
from kvferry.transport.agent import ReadState
from kvferry.transport.costs import TransferSettings
from kvferry.transport.read_speed import LEAST_BYTES, PATIENCE_SECONDS, ROUNDS, ReadSpeed
from kvferry.transport.staging import UNIT_BYTES, LaneResources, StagingArea
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

    def transfer(self, operation, local, here, remote, there):
        assert operation == "READ"
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
    """A peer whose READs take so long, one after the other. The last is repeated."""

    def __init__(self, *seconds: float, room=8) -> None:
        self.clock = Clock(100.0)
        self.agent = Transport(self.clock, *seconds, *seconds[-1:] * ROUNDS)
        self.landing = StagingArea(room * UNIT_BYTES, Region(0, 1))

    def speed(self, size=SIZE, memory=64 << 20, costs=COSTS) -> ReadSpeed:
        settings = TransferSettings(costs=costs)
        lane = LaneResources(self.agent, None, self.landing, np.zeros(0), None, [], settings, self.clock)
        return ReadSpeed(lane, "P", Region(1 << 40, memory), size)

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
    [(0.15, Strategy.SHARED), (1.5, Strategy.SHARED), (2.0, Strategy.DIRECT), (300.0, Strategy.DIRECT)],
)
def test_slow_reads_give_way_to_memory_that_both_map_and_fast_ones_stay(gigabytes_per_second, strategy):
    seconds = SIZE / (gigabytes_per_second * 1e9)
    speed = World(9.0, seconds * 2, seconds, seconds * 3).measured()
    assert speed.bytes_per_second == pytest.approx(gigabytes_per_second * 1e9)
    assert chosen(speed.costs, shared=True) is strategy
    assert chosen(speed.costs, shared=False) is Strategy.DIRECT


def test_costs_that_are_about_right_are_kept():
    for factor in (0.2, 1.0, 7.0):
        seconds = SIZE * COSTS.read_byte_seconds * factor
        assert World(seconds).measured().costs is COSTS


def test_reads_that_the_transport_ends_at_once_are_timed_without_a_pause():
    """A lane that sleeps between polls would take its own sleep for the READ's time."""
    world = World(1e-3, 1e-3)
    state = world.agent.state

    def polled(handle):
        world.clock.now += 1e-5
        return state(handle)

    world.agent.state = polled
    speed = world.speed()
    speed.advance()
    assert not speed.in_flight
    assert world.clock.now == pytest.approx(100.001)


@pytest.mark.parametrize("options", [{"size": 0}, {"memory": LEAST_BYTES - 1}, {"size": LEAST_BYTES - 1}])
def test_too_little_memory_is_not_measured(options):
    speed = World().measured(**options)
    assert (speed.bytes_per_second, speed.costs) == (0.0, COSTS)


def test_without_room_to_land_nothing_is_measured():
    world = World()
    taken = world.landing.allocate(7, UNIT_BYTES)
    speed = world.speed()
    speed.advance()
    assert (speed.ended, speed.pending) == (True, False)
    world.landing.free(taken)


@pytest.mark.parametrize("when", ["created", "read"])
def test_a_peer_that_cannot_be_read_is_not_measured(when):
    world = World(1e-3)
    world.agent.fault = RuntimeError("no route") if when == "created" else None
    world.agent.failed = when == "read"
    speed = world.measured()
    assert (speed.bytes_per_second, speed.costs) == (0.0, COSTS)


def test_orders_wait_for_a_peer_that_does_not_answer_for_a_second_only():
    world = World()
    speed = world.speed()
    speed.advance()
    assert speed.in_flight
    world.clock.now += PATIENCE_SECONDS * 0.99
    assert speed.pending
    world.clock.now += PATIENCE_SECONDS * 0.02
    speed.advance()
    assert (speed.pending, speed.in_flight, speed.ended) == (False, True, False)
