"""The checks of a GPU run without one: NIXL between two processes, torch's copies, the mover of chunks."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.gpu_check import copies, host, order, reads, report
from benchmarks.gpu_check.expandable import judge_expandable
from benchmarks.gpu_check.job import SMALL
from benchmarks.gpu_check.measure import CHECKS, GpuReport, measure
from benchmarks.gpu_check.result import CheckResult, CheckState, Figure, judged, ratio_figure
from kvferry.memory import device_copy, pool_cells

pytestmark = pytest.mark.transport


def quiet(_: str) -> None:
    """Progress is not looked at."""


@pytest.mark.long
def test_every_check_runs_on_a_cpu_or_says_why_not():
    names = [name for name in CHECKS if name != "pair"]  # tests/engine has it
    found = measure(SMALL, names, quiet)
    states = dict(zip(names, [check.state for check in found.checks], strict=True))
    assert states == {
        "reads": CheckState.PASSED,
        "copies": CheckState.PASSED,
        "busy": CheckState.NOT_RUN,
        "host": CheckState.PASSED,
        "order": CheckState.PASSED,
        "content": CheckState.NOT_RUN,
        "expandable": CheckState.NOT_RUN,
    }, [check.says for check in found.checks]
    assert all(check.says for check in found.checks)
    text = report.as_markdown(found)
    assert "Device: CPU (no GPU was checked)." in text
    assert "| READs | passed |" in text
    assert json.loads(json.dumps(report.as_json(found)))["checks"][0]["state"] == "passed"
    assert report.passed(found)


@pytest.mark.parametrize("name", ["copies", "host", "order"])
def test_a_spoiled_copy_fails_its_check(monkeypatch, name):
    def spoil(copy):
        def spoiled(*arguments):
            copy(*arguments)
            for memory in (arguments[0].elements, arguments[2]) if name != "copies" else (arguments[2],):
                flat = memory if isinstance(memory, np.ndarray) else memory.numpy()
                flat.reshape(-1)[4096 % flat.size] += 1

        return spoiled

    if name == "copies":
        monkeypatch.setattr(device_copy, "_copy_by_engine", spoil(device_copy._copy_by_engine))
    elif name == "host":
        monkeypatch.setattr(pool_cells, "copy_cells", spoil(pool_cells.copy_cells))
    else:
        monkeypatch.setattr(order._Engine, "forward", lambda self: lambda: self.cache.buffer[9000:].fill_(1))
        stored = order._stored
        once = [np.zeros(1, np.uint8)]
        monkeypatch.setattr(
            order, "_stored", lambda engine, waits: once.pop() if once else stored(engine, waits=waits)
        )
    (found,) = measure(SMALL, [name], quiet).checks
    assert found.state is CheckState.FAILED, found.says
    assert not report.passed(GpuReport("", {}, (found,), 0.0))


def test_a_check_that_raises_does_not_keep_others_from_running(monkeypatch):
    monkeypatch.setattr(reads, "source_and_destination", lambda device: 1 / 0)
    found = measure(SMALL, ["reads", "host"], quiet).checks
    assert [check.state for check in found] == [CheckState.FAILED, CheckState.PASSED]
    assert found[0].says == "ZeroDivisionError: division by zero"


def test_a_missed_goal_fails_and_is_named():
    slow = ratio_figure("gather: of a device copy", 0.79, copies.LEAST_OF_DEVICE_COPY)
    found = judged("copies", "Every byte is right.", [Figure("gather", "9 GB/s"), slow])
    assert found.state is CheckState.FAILED
    assert found.says == "Every byte is right. Missed goals: gather: of a device copy."
    text = report.as_markdown(GpuReport("a GPU", {"torch": "2"}, (found,), 1.0))
    assert "| gather: of a device copy | 0.79 | at least 0.8: MISSED |" in text
    assert ratio_figure("", 0.9, host.LEAST_OF_PINNED).met


@pytest.mark.parametrize(
    ("out", "state", "says"),
    [
        ({"state": "passed", "says": "Every byte arrived."}, "passed", "every byte arrived"),
        ({"state": "failed", "says": "3 of 9 bytes are not what they must be"}, "failed", "3 of 9 bytes"),
        ({"state": "failed", "says": "NIXL_ERR_BACKEND"}, "passed", "Refused: NIXL_ERR_BACKEND"),
        (None, "passed", "Refused: the process ended (core dumped)"),
    ],
)
def test_expandable_segments_are_refused_or_right(out, state, says):
    text = "" if out is None else json.dumps({"checks": [out]})
    found = judge_expandable(text, "UCX\ncore dumped\n")
    assert isinstance(found, CheckResult)
    assert found.state == state
    assert says in found.says
