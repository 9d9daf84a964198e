"""The ranks of another machine than the scheduler's: the first creates their arena, the others wait."""

from __future__ import annotations

from contextlib import closing
from unittest import mock

import pytest

from kvferry.common.errors import ConfigError
from kvferry.connector import mover as module
from kvferry.connector.messages import ArenaCard, LoadOrder, MachineRanks, Piece
from kvferry.connector.mover import ChunkMover
from kvferry.geometry import Region
from kvferry.geometry.canonical import canonical_form_of, share_of
from kvferry.planning.select import LoadSpan
from kvferry.tiers.host.arena import Arena
from kvferry.tiers.shares.arena import FarArena
from kvferry.tools.measuring.owned import OwnedCache, allocate
from kvferry.tools.models.layout import EngineShape
from support.loads import made_up_load
from support.models import attention, model

CHUNK, SIZE = 64, 1 << 20
SHAPE = EngineShape(4, (1,), 16, "LBHNC", 20)


@pytest.fixture(scope="module")
def caches() -> list[OwnedCache]:
    return [allocate(model(attention(heads=4, k=8, v=8)), SHAPE, rank, "cpu") for rank in range(4)]


def card(caches: list[OwnedCache], here: Arena, there: Arena | None) -> ArenaCard:
    """Two machines of two ranks each."""
    ranks = [cache.geometry for cache in caches]
    whole, first, rest = canonical_form_of(ranks, CHUNK), tuple(ranks[:2]), tuple(ranks[2:])
    machines = (
        MachineRanks(first, share_of(whole, first), here.handle),
        MachineRanks(rest, share_of(whole, rest), None if there is None else there.handle),
    )
    return ArenaCard(machines, SIZE)


def load(mover: ChunkMover) -> str | None:
    """Return why a load of one chunk fails; None if it does not."""
    order = LoadOrder("part", (Piece(0, 0, 4096),), first=True)
    mover.load(made_up_load("load", LoadSpan(0, 64, 65), [range(1, 6)]), order)
    mover.finish()
    ((key, report),) = mover.take_reports()
    assert key == "part"
    return report.failure


def test_the_first_rank_of_a_machine_creates_its_arena_and_the_others_attach_it(caches) -> None:
    with (
        closing(Arena.create(SIZE)) as here,
        closing(Arena.create(SIZE)) as there,
        closing(ChunkMover((0, 2))) as first,
        closing(ChunkMover((0, 3))) as second,
    ):
        described = FarArena(there.handle, Region(1 << 40, SIZE), b"agent")
        reachable = mock.Mock(arena=there, description=described)
        with mock.patch.object(module, "ReachableArena", return_value=reachable) as created:
            for mover in (first, second):
                mover.attach(card(caches, here, None))
                mover.finish()
        created.assert_called_once_with(SIZE, "127.0.0.1", None)
        assert (first.take_arenas(), first.take_arenas()) == ({1: described}, {})
        assert second.take_arenas() == {}
        assert load(first) is None
        assert load(second) == "no arena yet"
        for mover in (first, second):
            mover.attach(card(caches, here, there))
        assert load(second) is None
        assert load(first) is None


def test_a_machine_without_memory_says_why(caches) -> None:
    with closing(Arena.create(SIZE)) as here, closing(ChunkMover((0, 2))) as mover:
        with mock.patch.object(module, "ReachableArena", side_effect=ConfigError("too large")):
            mover.attach(card(caches, here, None))
            mover.finish()
        assert mover.take_arenas() == {1: "too large"}
        assert load(mover) == "too large"
