from __future__ import annotations

import math

import pytest

from kvferry.common.errors import ConfigError
from kvferry.tools.replay.trace.base import ArrivalTimes, TraceFile, batches


@pytest.fixture
def arrivals(tmp_path):
    (tmp_path / "trace").write_bytes(b"")
    return ArrivalTimes(TraceFile(tmp_path / "trace"))


def test_arrivals_begin_with_the_first_request(arrivals):
    assert [arrivals.arrival(line, time) for line, time in enumerate((-5.0, -5.0, 2.5), 1)] == [0, 0, 7.5]
    assert arrivals.late == 0


def test_a_request_that_is_a_little_late_in_the_file_arrives_with_the_one_before(arrivals):
    times = (100.0, 99.0, 170.0, 110.0, 160.0, 180.0)
    assert [arrivals.arrival(line, time) for line, time in enumerate(times, 1)] == [0, 0, 70, 70, 70, 80]
    assert arrivals.late == 3


def test_a_trace_that_is_not_sorted_is_refused(arrivals):
    arrivals.arrival(1, 0.0)
    arrivals.arrival(2, 3600.0)
    with pytest.raises(
        ConfigError, match=r"^trace, line 3: the request arrives 3,600\.0 s before an earlier"
    ):
        arrivals.arrival(3, 0.0)


@pytest.mark.parametrize("time", [1.7e12, -1.7e12, math.nan, math.inf])
def test_times_in_another_unit_are_refused(arrivals, time):
    with pytest.raises(
        ConfigError, match=r"^trace, line 1: the request arrives at .* s; at most 1e.11 s are"
    ):
        arrivals.arrival(1, time)


def test_batches_are_limited_by_units_and_by_requests():
    found = list(batches([4, 4, 4, 100, 1, 1, 1, 1], int, max_units=10, max_items=3))
    assert found == [[4, 4, 4], [100], [1, 1, 1], [1]]
    assert list(batches([], int)) == []
