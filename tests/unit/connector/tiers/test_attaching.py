"""The ranks attach the arena before the first request, and chunks use only memory that is allocated."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kvferry.connector.bids import Speeds
from kvferry.connector.blocks import PartBlocks
from kvferry.connector.config import ConnectorConfig, Tiers
from kvferry.connector.content import Adapters
from kvferry.connector.engine import PlainStep
from kvferry.connector.events import EventStream
from kvferry.connector.messages import ArenaCard, StepOrders
from kvferry.connector.tiers.tiering import Tiering
from kvferry.geometry import RankGeometry, Region
from kvferry.memory import pages
from kvferry.tiers.host.settings import HostSettings
from kvferry.tools.models.layout import EngineShape, lay_out
from support.block_pool import BlockPool
from support.engine_info import made_up
from support.models import attention, model

STEP = 4 << 20


@contextmanager
def opened(memory: str, allowed: threading.Event, wake: threading.Event | None = None) -> Iterator[Tiering]:
    (rank,) = lay_out(model(attention()), EngineShape(1, (1,), 16, "LBHNC", 100))
    regions = tuple(Region(one.address, one.length, memory, 0) for one in rank.regions)
    tiering = start(replace(rank, regions=regions), wake or threading.Event())
    try:
        yield tiering
    finally:
        allowed.set()
        tiering.shutdown()


def start(rank: RankGeometry, wake: threading.Event) -> Tiering:
    pool = BlockPool(100)
    return Tiering(
        Tiers(HostSettings(4 * STEP), ()),
        made_up(),
        ConnectorConfig(),
        [[rank]],
        pool=pool,
        parts=PartBlocks(rank.groups, pool),
        adapters=Adapters(),
        events=EventStream(),
        speeds=Speeds(),
        namespace=lambda _: pytest.fail("no tier in storage"),
        wake=wake.set,
    )


def step(tiering: Tiering) -> ArenaCard | None:
    orders = StepOrders()
    tiering.schedule(PlainStep(tokens={}, tables={}), [], orders)
    return orders.arena


def has_room(tiering: Tiering) -> bool:
    host = tiering._cache.host
    if (slot := host.reserve(b"chunk", 0)) is None:
        return False
    host.abort(slot)
    return True


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The kernel gives only the first step of the arena before this is set."""
    monkeypatch.setattr(pages, "POPULATE_STEP_BYTES", STEP)
    real, first, gate = pages._advise, [], threading.Event()

    def advise(address: int, length: int, advice: int) -> int:
        first.append(address)
        if address >= first[0] + STEP:
            assert gate.wait(60)
        return real(address, length, advice)

    monkeypatch.setattr(pages, "_advise", advise)
    return gate


def test_an_idle_engine_runs_a_step_in_which_its_ranks_attach_the_arena(allowed):
    with opened("DRAM", allowed) as tiering:
        assert tiering.busy
        assert has_room(tiering), "the first memory is there at once"
        card = step(tiering)
        assert card is not None
        (machine,) = card.machines
        assert machine.arena == tiering._arenas.own.handle
        assert not tiering.busy
        assert step(tiering) is None, "ranks attach once"


def test_ranks_with_gpus_attach_the_arena_when_all_of_it_is_allocated(allowed):
    wake = threading.Event()
    with opened("VRAM", allowed, wake) as tiering:
        assert not tiering.busy
        assert step(tiering) is None
        assert not has_room(tiering), "a rank could not copy to it"
        allowed.set()
        assert wake.wait(60), "nothing else makes an idle engine run a step"
        assert tiering.busy
        assert not has_room(tiering)
        assert step(tiering) is not None
        assert has_room(tiering)
        assert not tiering.busy
