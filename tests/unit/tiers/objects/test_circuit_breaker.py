from __future__ import annotations

import pytest

from kvferry.tiers.objects.access import CircuitBreaker
from support.clock import Clock


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def breaker(clock):
    return CircuitBreaker(3, 30.0, clock)


def fail(breaker: CircuitBreaker, times: int = 1) -> None:
    for _ in range(times):
        breaker.leave(breaker.enter(), succeeded=False)


def work(breaker: CircuitBreaker) -> None:
    breaker.leave(breaker.enter(), succeeded=True)


def test_failures_in_a_row_open_it(breaker):
    fail(breaker, 2)
    work(breaker)
    fail(breaker, 2)
    assert not breaker.is_open
    fail(breaker)
    assert breaker.is_open
    assert breaker.enter() is None


def test_open_breaker_admits_one_call_after_its_pause(breaker, clock):
    fail(breaker, 3)
    clock.now = 29.9
    assert breaker.enter() is None
    clock.now = 30.0
    assert not breaker.is_open
    ticket = breaker.enter()
    assert ticket is not None
    assert breaker.enter() is None
    assert breaker.is_open
    breaker.leave(ticket, succeeded=True)
    assert not breaker.is_open
    fail(breaker, 2)
    assert not breaker.is_open


def test_breaker_pauses_again_if_that_call_fails(breaker, clock):
    fail(breaker, 3)
    clock.now = 40.0
    fail(breaker)
    clock.now = 69.9
    assert breaker.enter() is None
    clock.now = 70.0
    work(breaker)
    assert not breaker.is_open


def test_calls_admitted_before_the_breaker_opened_do_not_close_it(breaker, clock):
    tickets = [breaker.enter() for _ in range(8)]
    for ticket in tickets[:3]:
        breaker.leave(ticket, succeeded=False)
    clock.now = 20.0
    for ticket in tickets[3:6]:
        breaker.leave(ticket, succeeded=False)
    breaker.leave(tickets[6], succeeded=True)
    assert breaker.is_open
    clock.now = 30.0
    ticket = breaker.enter()
    assert ticket is not None
    breaker.leave(tickets[7], succeeded=True)
    assert breaker.is_open
    breaker.leave(ticket, succeeded=False)
    clock.now = 59.9
    assert breaker.is_open
