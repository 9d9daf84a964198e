"""A thread that was kept from running says so."""

import logging

import pytest

from kvferry.common.limited_log import LimitedLog
from kvferry.transport.sockets import warn_if_late
from support.clock import Clock


@pytest.fixture
def clock():
    return Clock(100.0)


@pytest.fixture
def late(clock, caplog):
    """Wait so long, come back so much later; what is said of it."""
    log = LimitedLog(logging.getLogger("kvferry.transport"), clock=clock)

    def run(seconds: float, later: float) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "kvferry"):
            due = clock.now + seconds
            clock.now = due + later
            warn_if_late(log, "a thread", due, clock)
        return caplog.messages

    return run


def test_coming_back_in_time_or_early_is_not_worth_a_word(late):
    assert not late(0.2, 0.0)
    assert not late(5.0, -4.9)
    assert not late(5.0, 0.9)


def test_coming_back_late_is_said_with_how_late(late):
    [said] = late(0.2, 4.1)
    assert said.startswith("a thread: did not run for 4.1 s")


def test_a_delay_is_logged_once_a_minute(late, clock):
    assert late(0.2, 2.0)
    assert not late(0.2, 30.0)
    clock.now += 60.0
    assert late(0.2, 2.0)
