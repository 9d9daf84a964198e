"""Layouts are compared within a round, and must not change an answer."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from benchmarks.attention import report
from benchmarks.attention.measure import (
    DECODE,
    HANDOVER,
    MEASURES,
    PREFILL,
    TRANSFER,
    AttentionJob,
    check_equal,
)
from benchmarks.attention.page import summary
from kvferry.common.errors import TransferError

JOB = AttentionJob(requests=32, context=1000, steps=20, prompt=2048, block_tokens=32, rounds=2)
# The second round is ten times as slow as the first, which no ratio shows.
FOUND = {
    name: [{"LBHNC": 0.04 * slow, "BLHNC": 0.05 * slow, "BHLNC": 0.04 * slow * gain} for slow in (1.0, 10.0)]
    for name, gain in ((DECODE, 1.1), (PREFILL, 1.0), (HANDOVER, 0.8), (TRANSFER, 0.5))
}


def test_layouts_are_compared_within_a_round_and_the_report_fits_a_terminal() -> None:
    spread = report.ratio(FOUND[HANDOVER], "BHLNC")
    assert (spread.median, spread.low, spread.high) == pytest.approx((0.8, 0.8, 0.8))
    console = Console(file=io.StringIO(), width=80, highlight=False)
    report.show(JOB, FOUND, console)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "contiguous per block of 32 tokens: 64 KiB and 512 KiB (per layer, cross-layer)" in text
    rows = [line.split() for line in text.splitlines() if line.split()[:1] == ["BHLNC"]]
    assert [row[-2:] for row in rows] == [
        [ratio, f"({ratio}-{ratio})"] for ratio in ("1.10", "1.00", "0.80", "0.50")
    ]
    assert rows[0][1:3] == ["242.00", "44.00-440.00"]


def test_the_summary_has_a_row_for_each_measure_and_cross_layer_layout() -> None:
    found = summary(json.loads(json.dumps(report.as_json(JOB, FOUND))))
    assert found.low_is_good
    assert len(found.comparisons) == 2 * len(MEASURES)
    assert {one.against for one in found.comparisons} == {"LBHNC, per layer"}
    first, second = found.comparisons[:2]
    assert (first.label, first.ours) == ("decode step, 32 requests of 1,000 tokens, BLHNC", "275.00 ms")
    assert (second.ours, second.theirs) == ("242.00 ms", "220.00 ms")
    assert second.ratio.median == pytest.approx(1.1)
    assert "a decode step takes 1.10 (1.10 to 1.10) of its time with a per-layer layout" in found.answer
    assert "hand-over takes 0.80 (0.80 to 0.80) of its time" in found.answer


def test_layouts_that_answer_differently_are_an_error() -> None:
    check_equal({"LBHNC": [[1, 2]], "BHLNC": [[1, 2]]})
    with pytest.raises(TransferError, match="engines with BHLNC and LBHNC gave different tokens"):
        check_equal({"LBHNC": [[1, 2]], "BLHNC": [[1, 2]], "BHLNC": [[1, 3]]})


def test_the_cache_holds_all_requests_to_their_end() -> None:
    steps = (JOB.rounds + 1) * JOB.steps
    assert JOB.answer > steps
    assert JOB.longest >= JOB.context + JOB.answer
    assert JOB.cache_bytes > JOB.requests * (JOB.context + JOB.answer) * (16 << 10)
