"""Reports of several workers become one."""

from dataclasses import replace
from functools import reduce

import pytest

from kvferry.connector.loads import Loads
from kvferry.connector.messages import StepReports
from kvferry.planning.select import LoadSpan
from kvferry.transport.read_plan import LoadFigures, Report
from support.clock import Clock
from support.loads import made_up_load, only_read


def report(bytes_by_group, pages, descriptors, run_bytes, plan, transfer, check):
    return Report(
        None,
        figures=LoadFigures(
            bytes_by_group=bytes_by_group,
            pages=pages,
            descriptors=descriptors,
            run_bytes=run_bytes,
            plan_seconds=plan,
            transfer_seconds=transfer,
            check_seconds=check,
        ),
    )


def moved(*bytes_by_group):
    return LoadFigures(bytes_by_group=bytes_by_group)


def test_amounts_add_up_and_the_slowest_counts():
    one = report((10, 0), 2, 1, 512, 0.1, 0.5, 0.01)
    other = report((5, 7), 4, 3, 256, 0.3, 0.2, 0.02)
    assert one.with_other(other) == replace(report((15, 7), 6, 4, 512, 0.3, 0.5, 0.02), workers=2)
    assert one.with_other(other) == other.with_other(one)


def test_the_slowest_reads_and_any_reason_against_shared_memory_are_reported():
    found = [
        LoadFigures(read_bytes_per_second=speed, not_shared=why)
        for speed, why in ((3e8, ""), (2e8, "another user"), (0.0, ""))
    ]
    lanes = reduce(Report.with_lane, [Report(None, figures) for figures in found])
    loads = Loads(Clock())
    loads.begin(made_up_load("a", LoadSpan(0, 4, 5), []))
    loads.add(only_read("a"))
    loads.on_part_ended("a", lanes)
    one = loads.settle()[0].report
    other = Report(None, figures=LoadFigures(read_bytes_per_second=4e8))
    for whole in (one, one.with_other(other), other.with_other(one), one.with_other(Report(None))):
        figures = whole.figures
        assert (figures.read_bytes_per_second, figures.not_shared) == (2e8, "another user")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("corrupt", [False, True])
def test_one_failure_is_a_failure_of_all(late, lost, corrupt):
    bad = Report("it broke", late=int(late), peer_lost=lost, corrupt=corrupt)
    good = Report(None, figures=moved(1, 2))
    for whole in (good.with_other(bad), bad.with_other(good)):
        assert whole.failure == "it broke"
        assert (whole.late, whole.peer_lost, whole.corrupt) == (late, lost, corrupt)
        assert whole.figures == moved(1, 2)


@pytest.mark.parametrize("name", ["peer_lost", "corrupt"])
@pytest.mark.parametrize("value", [False, True])
def test_a_lost_peer_and_corrupt_bytes_are_reported_by_any_lane(name, value):
    one = Report(None, LoadFigures(reads=1))
    other = Report("it broke", **{name: value})
    for joined in (one.with_lane(other), other.with_lane(one)):
        assert getattr(joined, name) is value


def test_two_failures_without_bytes_are_one():
    assert Report("a").with_other(Report("b")) == Report("a", workers=2)


def test_reports_of_one_load_are_merged():
    whole = StepReports(reports={"a": Report(None, figures=moved(1))}, released={"c": 1})
    whole.add(
        StepReports(
            reports={"a": Report("late", late=1, figures=moved(2)), "b": Report(None)}, released={"c": 1}
        )
    )
    assert whole.reports == {"a": Report("late", late=1, figures=moved(3), workers=2), "b": Report(None)}
    assert whole.released == {"c": 2}


def test_reports_of_many_workers_are_counted():
    whole = StepReports()
    for number in range(4):
        whole.add(StepReports(reports={"a": Report(None, late=number % 2)}))
    assert (whole.reports["a"].workers, whole.reports["a"].late) == (4, 2)


def test_empty_reports_are_false():
    assert not StepReports()
    assert StepReports(reports={"a": Report(None)})
    assert StepReports(released={"a": 1})
