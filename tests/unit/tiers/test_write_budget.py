"""The bytes that may be written per day."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from kvferry.tiers.write_budget import WriteBudget
from support.examples import examples

DAY, HOUR = 86_400.0, 3600.0
PER_DAY = 24_000


def test_the_budget_of_an_hour_can_be_written_at_once():
    budget = WriteBudget(PER_DAY)
    written = 0
    while budget.left(0.0):
        budget = budget.after_write(10, 0.0)
        written += 10
    assert written == PER_DAY / 24
    assert not budget.left(1.0) > 0.01
    assert budget.left(2 * HOUR) == 1.0


@given(st.lists(st.tuples(st.floats(0, HOUR), st.integers(1, 50)), min_size=1, max_size=200))
@examples(100)
def test_no_24_hours_have_more_than_the_budget_of_a_day(demand):
    budget, now, written = WriteBudget(PER_DAY), 0.0, list[tuple[float, int]]()
    for wait, chunks in demand:
        now += wait
        for _ in range(chunks):
            if budget.left(now):
                budget = budget.after_write(100, now)
                written.append((now, 100))
    for begin, _ in written:
        assert sum(size for at, size in written if begin <= at < begin + DAY) <= PER_DAY + 100


def test_a_steady_writer_gets_nearly_the_whole_budget():
    budget, written = WriteBudget(PER_DAY), 0
    for minute in range(24 * 60):
        while budget.left(minute * 60.0):
            budget = budget.after_write(10, minute * 60.0)
            written += 10
    assert written == pytest.approx(PER_DAY, rel=0.01)


def test_a_chunk_larger_than_what_is_left_is_written_and_delays_the_next():
    budget = WriteBudget(PER_DAY).after_write(3 * PER_DAY // 24, 0.0)
    assert budget.left(2 * HOUR) == 0.0
    assert budget.left(2.2 * HOUR) > 0.0


def test_a_clock_that_was_far_ahead_stops_writes_for_a_day_at_most():
    budget = WriteBudget(PER_DAY, full_at=1e9)
    assert budget.left(0.0) == 0.0
    assert budget.after_write(0, 0.0).left(DAY) == 1.0
