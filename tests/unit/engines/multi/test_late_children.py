"""Whatever children of other projects report, no request waits for ever, and late loads keep their blocks."""

from __future__ import annotations

from hypothesis import given, strategies as st

from support.examples import examples
from support.late_children import CHILDREN, DEADLINE, WORKERS, LateChildren, Multi

BLOCKS, LENGTH = 40, 70
EVERY_WORKER = range(WORKERS)


def run_down(ours: LateChildren) -> None:
    """Step, past every deadline, until no request is left."""
    for _ in range(60):
        Multi.now.now += DEADLINE / 4
        ours.step()
        if not ours.scheduler.requests:
            return
    raise AssertionError(f"requests wait for ever: {[*ours.scheduler.requests]}")


def ended(child: int, name: str, *, failed: bool = False) -> dict[int, list[tuple[int, str, bool]]]:
    return {worker: [(child, name, failed)] for worker in EVERY_WORKER}


def test_a_request_goes_on_without_a_child_that_never_reports_and_its_blocks_stay_pinned() -> None:
    ours = LateChildren(BLOCKS)
    free = ours.pool.get_num_free_blocks()
    name = ours.ask([*range(LENGTH)]).request_id
    run_down(ours)
    assert ours.answered == {name}
    assert ours.begun == [(name, 0), (name, 1)], "the other child is tried"
    pinned = free - ours.pool.get_num_free_blocks()
    assert pinned > 0
    for child in range(CHILDREN):
        ours.report(ended(child, name))
    assert ours.pool.get_num_free_blocks() == free
    ours.connector.get_kv_connector_stats()
    assert +ours.connector.ends == {("Foreign", "expired"): 1, ("Foreign-2", "expired"): 1}


def test_a_request_that_was_aborted_while_a_child_loads_does_not_hold_its_place() -> None:
    ours = LateChildren(BLOCKS)
    name = ours.ask([*range(LENGTH)]).request_id
    ours.step()
    ours.abort(name)
    run_down(ours)
    assert not ours.scheduler.requests


def test_a_child_that_holds_half_of_the_pool_loads_nothing_more() -> None:
    ours = LateChildren(BLOCKS)
    for first in range(0, 9000, 1000):
        ours.ask([*range(first, first + LENGTH)], answer=1)
        run_down(ours)
    assert len(ours.answered) == 9
    assert len(ours.begun) < 2 * 9
    assert ours.pool.get_num_free_blocks() > 0


def test_blocks_come_free_when_every_worker_has_ended_the_late_load() -> None:
    ours = LateChildren(BLOCKS)
    free = ours.pool.get_num_free_blocks()
    name = ours.ask([*range(LENGTH)], answer=1).request_id
    ours.step()
    ours.report({0: [(0, name, False)]})  # before the deadline, and the other worker does not
    run_down(ours)
    ours.report(ended(1, name))
    assert ours.pool.get_num_free_blocks() < free
    ours.report({1: [(0, name, False)]})
    assert ours.answered == {name}
    assert ours.pool.get_num_free_blocks() == free


def test_a_worker_that_reports_twice_does_not_report_for_another() -> None:
    ours = LateChildren(BLOCKS)
    free = ours.pool.get_num_free_blocks()
    name = ours.ask([*range(LENGTH)], answer=1).request_id
    run_down(ours)
    for child in range(CHILDREN):
        for _ in range(3):
            ours.report({0: [(child, name, False)]})
    assert ours.pool.get_num_free_blocks() < free
    for child in range(CHILDREN):
        ours.report({1: [(child, name, False)]})
    assert ours.pool.get_num_free_blocks() == free


@examples(60)
@given(st.data())
def test_whatever_children_report_requests_end_and_late_loads_own_their_blocks(data: st.DataObject) -> None:
    ours = LateChildren(BLOCKS)
    free = ours.pool.get_num_free_blocks()
    asked: list[str] = []
    for _ in range(data.draw(st.integers(1, 12))):
        event = data.draw(st.sampled_from(["ask", "step", "late", "report", "stranger", "abort"]))
        if event == "ask" and len(asked) < 5:
            asked.append(ours.ask([*range(1000 * len(asked), 1000 * len(asked) + LENGTH)]).request_id)
            ours.step()
        elif event == "step":
            ours.step()
        elif event == "late":
            Multi.now.now += DEADLINE + 1
            ours.step()
        elif event == "report" and ours.begun:  # some of them twice
            name, child = data.draw(st.sampled_from(ours.begun))
            worker, failed = data.draw(st.sampled_from(EVERY_WORKER)), data.draw(st.booleans())
            ours.report({worker: [(child, name, failed)]})
        elif event == "stranger":
            child = data.draw(st.integers(0, CHILDREN - 1))
            ours.report(ended(child, "nobody"))
        elif event == "abort" and asked:
            ours.abort(data.draw(st.sampled_from(asked)))
    run_down(ours)
    for name, child in ours.begun:  # each ends at last, again if it has ended before
        ours.report(ended(child, name))
    ours.step()
    assert ours.pool.get_num_free_blocks() == free
    assert len(ours.connector._admission.late) == 0
