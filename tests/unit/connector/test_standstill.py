"""A claim is given up when requests wait for blocks that leases keep, and none gets any."""

from __future__ import annotations

import pytest

from kvferry.connector.standstill import LAPSE_SECONDS, Standstill
from support.clock import Clock

PATIENCE = 10.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def standstill(clock: Clock) -> Standstill:
    return Standstill(PATIENCE, clock)


def test_the_first_claim_is_given_up_after_the_patience_and_then_one_after_the_other(standstill, clock):
    assert not standstill.claim_lapses(0, leases_block=False)
    found = []
    for _ in range(48):
        clock.now += 0.25
        if standstill.claim_lapses(0, leases_block=True):
            found.append(clock.now)
    first = found[0]
    assert first == pytest.approx(PATIENCE, abs=0.25)
    assert found == [first + number * LAPSE_SECONDS for number in range(len(found))]
    assert len(found) > 1


@pytest.mark.parametrize("change", ["a request gets blocks", "leases keep none that are needed"])
def test_a_step_that_goes_on_ends_the_standstill(standstill, clock, change):
    standstill.claim_lapses(0, leases_block=False)
    clock.now += PATIENCE - 1
    assert not standstill.claim_lapses(change.startswith("a"), leases_block=change.startswith("a"))
    clock.now += PATIENCE - 1
    assert not standstill.claim_lapses(change.startswith("a"), leases_block=True)
    clock.now += 1
    assert standstill.claim_lapses(change.startswith("a"), leases_block=True)
