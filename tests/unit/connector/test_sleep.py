"""Engines that sleep and wake up: what the scheduler half does about it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from msgspec import structs

from kvferry.connector.blocks import Transfer
from kvferry.connector.messages import WorkerInfo
from kvferry.connector.scheduler import SchedulerHalf
from unit.connector.test_calm_steps import started


@pytest.fixture
def half() -> Iterator[SchedulerHalf]:
    with started() as one:
        yield one


def incarnation(half: SchedulerHalf) -> int:
    return half._peering.server._card.facts.incarnation


def workers(half: SchedulerHalf, run: int | None = None, stale: int | None = None) -> list[WorkerInfo]:
    """The engine's only worker; `run` is the number of its present run, if it has woken up."""
    (card,) = half._peering.server.ranks
    if run is not None:
        card = SimpleNamespace(incarnation=run, geometry=card.geometry)
    return [WorkerInfo(geometry=card.geometry, card=card, stale=stale)]


def test_peers_see_a_woken_engine_as_one_that_was_started_again(half):
    before, first = incarnation(half), half._peering.server._card.facts
    half.wake(workers(half))
    assert incarnation(half) == before, "its workers are the same"
    half.wake(workers(half, run=7))
    assert incarnation(half) != before
    card = half._peering.server._card
    assert card.facts == structs.replace(first, incarnation=incarnation(half))
    assert [rank.incarnation for rank in card.ranks] == [7]
    assert half._peering.producer._book._incarnation == card.facts.incarnation


def test_the_reset_of_an_engine_that_falls_asleep_begins_no_epoch(half):
    half.on_sleep()
    half.reset()
    half.on_asleep(failed=False)
    half.wake(workers(half, run=7))
    assert half._epoch == 0
    half.reset()
    assert half._epoch == 1, "a reset of its own"


@pytest.mark.parametrize(("stale", "epoch"), [(None, 1), (0, 1), (1, 2)])
def test_weights_that_changed_while_it_slept_begin_an_epoch(half, stale, epoch):
    half.reset()
    half.on_sleep()
    half.reset()
    half.on_asleep(failed=False)
    half.wake(workers(half, run=7, stale=stale))
    assert half._epoch == epoch


def test_an_engine_that_could_not_fall_asleep_is_reset(half):
    half.on_sleep()
    half.reset()
    half.on_asleep(failed=True)
    assert half._epoch == 1


def test_a_pause_waits_for_loads_that_outlive_their_requests(half):
    half.admission.loads.begin(Transfer(key="a load", holder="a peer", blocks=[]))
    assert not half.busy
    half.on_pause(paused=True)
    assert half.busy
    half.admission.loads.end("a load", 1)
    assert not half.busy
