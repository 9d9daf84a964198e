"""Reports of several workers become one."""

import pytest

pytest.importorskip("vllm")

from kvferry.engines.vllm.meta import Report, WorkerMeta


def report(bytes_by_group, pages, descriptors, run_bytes, plan, transfer, check):
    return Report(
        None,
        bytes_by_group=bytes_by_group,
        pages=pages,
        descriptors=descriptors,
        run_bytes=run_bytes,
        plan_seconds=plan,
        transfer_seconds=transfer,
        check_seconds=check,
    )


def test_amounts_add_up_and_the_slowest_counts():
    one = report((10, 0), 2, 1, 512, 0.1, 0.5, 0.01)
    other = report((5, 7), 4, 3, 256, 0.3, 0.2, 0.02)
    assert one.with_other(other) == report((15, 7), 6, 4, 512, 0.3, 0.5, 0.02)
    assert one.with_other(other) == other.with_other(one)


@pytest.mark.parametrize("late", [False, True])
def test_one_failure_is_a_failure_of_all(late):
    good, bad = Report(None, bytes_by_group=(1, 2)), Report("it broke", late=late)
    for whole in (good.with_other(bad), bad.with_other(good)):
        assert whole.failure == "it broke"
        assert whole.late is late
        assert whole.bytes_by_group == (1, 2)


def test_two_failures_without_bytes_are_one():
    assert Report("a").with_other(Report("b")) == Report("a")


def test_workers_that_speak_of_the_same_load_are_merged():
    one = WorkerMeta({"a": Report(None, bytes_by_group=(1,))}, {"a": 1}, {"a": 1})
    other = WorkerMeta(
        {"a": Report("late", late=True, bytes_by_group=(2,)), "b": Report(None)}, {"a": 1, "b": 1}, {"c": 1}
    )
    whole = one.aggregate(other)
    assert whole.reports == {"a": Report("late", late=True, bytes_by_group=(3,)), "b": Report(None)}
    assert whole.reported == {"a": 2, "b": 1}
    assert whole.released == {"a": 1, "c": 1}


def test_many_workers_count_to_their_number():
    metas = [WorkerMeta({"a": Report(None)}, {"a": 1}, {"a": 1}) for _ in range(4)]
    whole = metas[0]
    for meta in metas[1:]:
        whole = whole.aggregate(meta)
    assert whole.reported == whole.released == {"a": 4}


def test_nothing_to_say_is_false():
    assert not WorkerMeta()
    assert WorkerMeta(reports={"a": Report(None)})
    assert WorkerMeta(released={"a": 1})
