"""Lines that others can cause: few of them, however many there are to say."""

import logging

import pytest

from kvferry.common.limited_log import LimitedLog
from kvferry.connector.events import EventStream, SourceRefused
from support.clock import Clock


@pytest.fixture
def clock():
    return Clock(0.0)


@pytest.fixture
def log(clock):
    return LimitedLog(logging.getLogger("limited"), most=3, seconds=60.0, clock=clock)


def lines(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_cause_is_said_once_in_a_window_and_the_next_line_counts_the_rest(log, clock, caplog):
    for _ in range(1000):
        log.say("a", "first")
    clock.now += 59
    log.say("a", "first")
    assert lines(caplog) == ["first"]
    clock.now += 1
    for _ in range(3):
        log.say("a", "again")
    log.say("b", "more")
    log.say("c", "more")
    assert lines(caplog) == [
        "first",
        "again (1,000 more warnings left out before this one)",
        "more (2 more warnings left out before this one)",
        "more",
    ]


def test_causes_that_are_made_up_get_few_lines_and_no_memory(log, clock, caplog):
    for number in range(10_000):
        log.say(f"cause {number}", "line")
    assert len(lines(caplog)) == 3
    assert len(log._said) == 3
    clock.now += 60
    log.say("cause 7", "line")
    assert lines(caplog)[-1] == "line (9,997 more warnings left out before this one)"


def test_an_unexpected_error_is_shown_in_full_once(log, caplog):
    for _ in range(3):
        log.say("bug", "broken", ValueError("why"))
    (record,) = caplog.records
    assert isinstance(record.exc_info[1], ValueError)


def test_a_flood_of_refusals_with_long_names_writes_little_and_tells_every_one(caplog):
    told: list[SourceRefused] = []
    events, long = EventStream(told.append), "x\n" * (1 << 19)
    for number in range(150):
        events.refuse(f"{long}-{number}", f"{long}@10.0.0.{number}:1", f"{number} {long}")
    assert len(told) == 150
    assert all(len(event.request_id) + len(event.source) + len(event.reason) < 2000 for event in told)
    assert 0 < len(caplog.text) < 40_000
    assert len(lines(caplog)) == 20
    assert all("\n" not in line for line in lines(caplog))
