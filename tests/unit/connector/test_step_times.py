"""How fast prompts are computed, by the two hooks that an engine calls once per step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvferry.connector.bids import StepTimes
from support.clock import Clock

DONE = None


def recorded(*calls):
    """Computations that are recorded, given (time, tokens of a scheduled step or DONE) of each call."""
    clock, found = Clock(), []
    speeds = SimpleNamespace(record_computation=lambda tokens, seconds: found.append((tokens, seconds)))
    steps = StepTimes(speeds, clock)
    for clock.now, tokens in calls:
        if tokens is DONE:
            steps.done()
        else:
            steps.scheduled(tokens)
    return found


def test_a_step_is_recorded_when_its_output_is_taken():
    assert recorded((100, 1000)) == []
    assert recorded((100, 1000), (102, DONE)) == [(1000, 2)]


def test_idle_time_between_steps_does_not_count():
    assert recorded((100, 1000), (102, DONE), (200, 500), (201, DONE)) == [(1000, 2), (500, 1)]


def test_a_step_scheduled_during_another_begins_when_that_one_is_done():
    calls = (100, 1000), (101, 600), (104, DONE), (105, 1), (107, DONE), (108, DONE)
    assert recorded(*calls) == [(1000, 4), (600, 3)]


@pytest.mark.parametrize(("tokens", "found"), [(127, []), (128, [(128, 1)])])
def test_a_small_step_is_not_recorded(tokens, found):
    assert recorded((100, tokens), (101, DONE)) == found


def test_output_without_a_step_is_not_recorded():
    assert recorded((100, DONE), (101, 1000), (102, DONE)) == [(1000, 1)]


def test_an_engine_is_idle_after_a_step_without_tokens_and_some_time_after_the_last_step():
    clock = Clock()
    steps = StepTimes(SimpleNamespace(record_computation=lambda *_: None), clock)
    assert steps.idle
    clock.now = 100
    steps.scheduled(1)
    assert not steps.idle  # under way
    clock.now = 102
    steps.done()
    assert not steps.idle  # the next step of the same requests comes at once
    clock.now = 102.1
    assert steps.idle
    clock.now = 103
    steps.scheduled(1)
    steps.scheduled(0)
    clock.now = 104
    steps.done()
    assert steps.idle


def test_an_engine_is_not_idle_while_one_of_several_steps_computes():
    steps = StepTimes(SimpleNamespace(), Clock())
    steps.scheduled(5)
    steps.scheduled(0)
    assert not steps.idle
