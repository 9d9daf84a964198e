"""The time until sources answer, and the answers that a request waits for."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from kvferry.connector.speeds import LATELY_SECONDS, AnswerTimes, AwaitedAnswers
from support.clock import Clock


def test_an_answer_that_was_never_measured_is_expected_at_once():
    assert AnswerTimes(Clock()).seconds("peer") == 0.0


@given(st.lists(st.floats(0, 100), min_size=1, max_size=20))
def test_the_expected_time_lies_between_those_measured_and_nearer_to_the_newest(measured):
    times = AnswerTimes(Clock())
    for seconds in measured:
        before = times.seconds("peer")
        times.record("peer", seconds)
    assert min(measured) - 1e-9 <= times.seconds("peer") <= max(measured) + 1e-9
    if len(measured) > 1:
        assert abs(times.seconds("peer") - seconds) <= abs(before - seconds) + 1e-9


def test_each_answer_has_a_time_of_its_own():
    times = AnswerTimes(Clock())
    times.record("peer", 1.0)
    times.record("disk", 3.0)
    assert (times.seconds("peer"), times.seconds("disk")) == (1.0, 3.0)


@given(st.floats(0, 100), st.floats(0, 100))
def test_a_wait_in_vain_raises_the_expected_time_and_never_lowers_it(measured, waited):
    times = AnswerTimes(Clock())
    times.record("peer", measured)
    times.record_unanswered("peer", waited)
    assert (times.seconds("peer") > measured) == (waited > measured)
    assert times.seconds("peer") >= measured
    assert times.seconds("peer") <= max(measured, waited) + 1e-9


def test_old_measurements_are_forgotten():
    clock = Clock()
    times = AnswerTimes(clock)
    for number in range(5):
        times.record(f"peer {number}", 2.0)
    clock.now += LATELY_SECONDS + 1
    assert times.seconds("peer 0") == 0.0
    for _ in range(5):
        times.record("other", 1.0)
    assert len(times) == 1, "peers that are gone must not pile up"


def test_an_answer_is_timed_from_the_first_question():
    times, awaited = AnswerTimes(Clock()), AwaitedAnswers()
    for now in (10.0, 11.0, 12.0):
        awaited.note(["peer"])
        awaited.settle(times, now)
    assert times.seconds("peer") == 0.0
    awaited.settle(times, 13.0)
    assert times.seconds("peer") == 3.0
    awaited.settle(times, 99.0)
    awaited.give_up(times, 99.0)
    assert times.seconds("peer") == 3.0, "it has answered, and is timed once"


def test_an_answer_that_only_one_of_two_questions_lacks_is_missing():
    """An admission may ask again for a shorter prefix, and only then has the peer anything to say."""
    times, awaited = AnswerTimes(Clock()), AwaitedAnswers()
    for now in (10.0, 11.0):
        awaited.note([])
        awaited.note(["peer"])
        awaited.settle(times, now)
    assert times.seconds("peer") == 0.0


@pytest.mark.parametrize(("known", "expected"), [(0.0, 4.0), (9.0, 9.0)])
def test_a_request_that_goes_on_records_the_time_without_an_answer(known, expected):
    times, awaited = AnswerTimes(Clock()), AwaitedAnswers()
    if known:
        times.record("peer", known)
    awaited.note(["peer"])
    awaited.settle(times, 10.0)
    awaited.give_up(times, 14.0)
    assert times.seconds("peer") == expected
    awaited.give_up(times, 50.0)
    assert times.seconds("peer") == expected, "it waits no more"
