"""CPU times of routers are compared within a round, and what is reported of them fits a terminal."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from benchmarks.router import report
from benchmarks.router.measure import Cpu
from benchmarks.router.page import summary

# The second round is twice as slow as the first, which no ratio shows.
FOUND = [
    Cpu("kvferry", stream=False, milliseconds=(0.6, 1.2)),
    Cpu("vllm-router", stream=False, milliseconds=(0.3, 0.6)),
    Cpu("kvferry", stream=True, milliseconds=(3.0, 6.0)),
    Cpu("vllm-router", stream=True, milliseconds=(2.0, 2.0)),
]


def test_a_time_is_compared_with_the_other_routers_of_its_round() -> None:
    found = report.ratios(FOUND)
    assert (found[False].low, found[False].high) == (2.0, 2.0)
    assert (found[True].low, found[True].median, found[True].high) == (1.5, 2.25, 3.0)
    assert report.ratios([FOUND[0], FOUND[2]]) == {}


@pytest.mark.parametrize("found", [FOUND, [FOUND[0], FOUND[2]]], ids=["both", "alone"])
def test_the_report_fits_a_terminal(found) -> None:
    console = Console(file=io.StringIO(), width=200, highlight=False)
    report.show(found, console)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert ("missed" in lines[-1]) is (found is FOUND)


def test_the_page_has_a_row_for_each_kind_of_answer() -> None:
    found = summary(json.loads(json.dumps(report.as_json(FOUND))))
    assert [(one.ours, one.theirs) for one in found.comparisons] == [
        ("0.90 ms", "0.45 ms"),
        ("4.50 ms", "2.00 ms"),
    ]
    assert "2.00 (2.00-2.00) for an answer as a whole and 2.25 (1.50-3.00)" in found.answer
    assert summary(report.as_json(FOUND[:1])).comparisons == ()
