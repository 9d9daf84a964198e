"""The time until sources answer, the answers that a request waits for, and how long it has waited."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from kvferry.connector.bids import LATELY_SECONDS, Speeds
from kvferry.connector.choosing import RequestState
from support.clock import Clock
from support.offers import bid


def test_an_answer_that_was_never_measured_is_expected_at_once():
    assert Speeds(Clock()).answer_seconds("peer") == 0.0


@given(st.lists(st.floats(0, 100), min_size=1, max_size=20))
def test_the_expected_time_lies_between_those_measured_and_nearer_to_the_newest(measured):
    speeds = Speeds(Clock())
    for seconds in measured:
        before = speeds.answer_seconds("peer")
        speeds.record_answer("peer", seconds)
    assert min(measured) - 1e-9 <= speeds.answer_seconds("peer") <= max(measured) + 1e-9
    if len(measured) > 1:
        assert abs(speeds.answer_seconds("peer") - seconds) <= abs(before - seconds) + 1e-9


def test_each_answer_has_a_time_of_its_own():
    speeds = Speeds(Clock())
    speeds.record_answer("peer", 1.0)
    speeds.record_answer("disk", 3.0)
    assert (speeds.answer_seconds("peer"), speeds.answer_seconds("disk")) == (1.0, 3.0)


@given(st.floats(0, 100), st.floats(0, 100))
def test_a_wait_in_vain_raises_the_expected_time_and_never_lowers_it(measured, waited):
    speeds = Speeds(Clock())
    speeds.record_answer("peer", measured)
    speeds.record_unanswered("peer", waited)
    assert (speeds.answer_seconds("peer") > measured) == (waited > measured)
    assert speeds.answer_seconds("peer") >= measured
    assert speeds.answer_seconds("peer") <= max(measured, waited) + 1e-9


def test_old_measurements_are_forgotten():
    clock = Clock()
    speeds = Speeds(clock)
    for number in range(5):
        speeds.record_answer(f"peer {number}", 2.0)
    clock.now += LATELY_SECONDS + 1
    assert speeds.answer_seconds("peer 0") == 0.0
    for _ in range(5):
        speeds.record_answer("other", 1.0)
    assert len(speeds._answers) == 1, "peers that are gone must not pile up"


def test_an_answer_is_timed_from_the_first_question():
    speeds, state = Speeds(Clock()), RequestState(attempts=1)
    for now in (10.0, 11.0, 12.0):
        state.end_wait({"peer"}, speeds, now)
    assert speeds.answer_seconds("peer") == 0.0
    state.end_wait(set(), speeds, 13.0)
    assert speeds.answer_seconds("peer") == 3.0
    state.end_wait(set(), speeds, 99.0)
    state.admit(0, speeds, 99.0)
    assert speeds.answer_seconds("peer") == 3.0, "it has answered, and is timed once"


@pytest.mark.parametrize(("known", "expected"), [(0.0, 4.0), (9.0, 9.0)])
def test_a_request_that_goes_on_records_the_time_without_an_answer(known, expected):
    speeds, state = Speeds(Clock()), RequestState(attempts=1)
    if known:
        speeds.record_answer("peer", known)
    state.end_wait({"peer"}, speeds, 10.0)
    state.admit(0, speeds, 14.0)
    assert speeds.answer_seconds("peer") == expected
    state.admit(0, speeds, 50.0)
    assert speeds.answer_seconds("peer") == expected, "it waits no more"


def test_the_time_between_two_waits_does_not_count():
    speeds, state = Speeds(Clock()), RequestState(attempts=1)
    looking = bid(looking=True, peer=16)

    def wait(now):
        assert state.propose(looking, 0, now, crowded=False, patience_seconds=10.0) is None

    assert state.waited_seconds(10.0) == 0.0
    wait(10.0)
    assert state.waited_seconds(13.0) == 3.0
    state.end_wait(set(), speeds, 13.0)
    assert state.waited_seconds(99.0) == 3.0, "it was not told to wait: the engine had no blocks for it"
    wait(99.0)
    wait(100.0)
    assert state.waited_seconds(101.0) == 4.0
