"""A claim is given up when requests wait for blocks that leases keep, and none gets any."""

from __future__ import annotations

import pytest

from kvferry.connector.peers.peering import LAPSE_SECONDS, _Standstill
from support.clock import Clock

PATIENCE = 10.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def standstill(clock: Clock) -> _Standstill:
    return _Standstill(PATIENCE, clock)


def blocked() -> bool:
    return True


def free() -> bool:
    return False


def test_the_first_claim_is_given_up_after_the_patience_and_then_one_after_the_other(standstill, clock):
    assert not standstill.claim_lapses(0, free)
    found = []
    for _ in range(60):
        clock.now += 0.25
        if standstill.claim_lapses(0, blocked):
            found.append(clock.now)
    first = found[0]
    assert PATIENCE <= first <= PATIENCE + LAPSE_SECONDS
    assert found == [first + number * LAPSE_SECONDS for number in range(len(found))]
    assert len(found) > 1


@pytest.mark.parametrize(("admitted", "look"), [(1, blocked), (0, free)], ids=["blocks are got", "none lack"])
def test_a_step_that_goes_on_ends_the_standstill(standstill, clock, admitted, look):
    standstill.claim_lapses(0, free)
    clock.now += PATIENCE - 1
    assert not standstill.claim_lapses(admitted, look)
    clock.now += PATIENCE - 1
    assert not standstill.claim_lapses(admitted, blocked)
    clock.now += LAPSE_SECONDS
    assert standstill.claim_lapses(admitted, blocked)


def test_requests_are_looked_at_once_a_second_at_most(standstill, clock):
    looks = []
    for _ in range(40):
        clock.now += 0.125
        standstill.claim_lapses(0, lambda: bool(looks.append(clock.now)))
    assert len(looks) == 5
