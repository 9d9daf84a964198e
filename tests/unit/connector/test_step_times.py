"""How fast prompts are computed, by the two hooks that an engine calls once per step."""

from __future__ import annotations

import pytest

from kvferry.connector.step_times import StepTimes
from support.clock import Clock


class Speeds:
    """Remembers what it was told."""

    def __init__(self):
        self.computed_steps = []

    def record_computation(self, tokens, seconds):
        self.computed_steps.append((tokens, seconds))


class Engine:
    """Schedules steps, and takes their outputs, when a test says."""

    def __init__(self):
        self.clock, self.speeds = Clock(), Speeds()
        self.steps = StepTimes(self.speeds, self.clock)

    def schedule(self, tokens, at):
        self.clock.now = at
        self.steps.scheduled(tokens)

    def take(self, at):
        self.clock.now = at
        self.steps.done()

    def told(self):
        return self.speeds.computed_steps


def test_a_step_that_ends_all_of_its_requests_is_told_when_its_output_is_taken():
    engine = Engine()
    engine.schedule(1000, at=100)
    assert engine.told() == []
    engine.take(at=102)
    assert engine.told() == [(1000, 2)]


def test_the_time_in_which_an_engine_rests_is_no_steps():
    engine = Engine()
    engine.schedule(1000, at=100)
    engine.take(at=102)
    engine.schedule(500, at=200)
    engine.take(at=201)
    assert engine.told() == [(1000, 2), (500, 1)]


def test_a_step_that_is_scheduled_while_another_is_under_way_begins_when_that_is_done():
    engine = Engine()
    engine.schedule(1000, at=100)
    engine.schedule(600, at=101)
    engine.take(at=104)
    engine.schedule(1, at=105)
    engine.take(at=107)
    engine.take(at=108)
    assert engine.told() == [(1000, 4), (600, 3)]


@pytest.mark.parametrize(("tokens", "told"), [(127, []), (128, [(128, 1)])])
def test_a_small_step_says_nothing_of_prompts(tokens, told):
    engine = Engine()
    engine.schedule(tokens, at=100)
    engine.take(at=101)
    assert engine.told() == told


def test_stats_that_are_asked_for_without_a_step_say_nothing():
    engine = Engine()
    engine.take(at=100)
    engine.schedule(1000, at=101)
    engine.take(at=102)
    assert engine.told() == [(1000, 1)]


def test_an_engine_is_idle_after_a_step_without_tokens_and_some_time_after_the_last_step():
    engine = Engine()
    assert engine.steps.idle
    engine.schedule(1, at=100)
    assert not engine.steps.idle  # under way
    engine.take(at=102)
    assert not engine.steps.idle  # the next step of the same requests comes at once
    engine.clock.now = 102.1
    assert engine.steps.idle
    engine.schedule(1, at=103)
    engine.schedule(0, at=103)
    engine.take(at=104)
    assert engine.steps.idle


def test_an_engine_is_not_idle_while_one_of_several_steps_computes():
    engine = Engine()
    engine.schedule(5, at=100)
    engine.schedule(0, at=100)
    assert not engine.steps.idle
