"""What is reported follows from what was measured."""

from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console

from kvferry.tools.bench import transfer as transfer_report
from kvferry.tools.bench.rounds import MoverRounds
from kvferry.tools.bench.transfer import MeasuredTransfer
from kvferry.tools.measuring.rounds import Spread
from kvferry.tools.report import Report
from support.bench_results import transfer


def _shown(measured: MeasuredTransfer, width: int | None = 80) -> str:
    out = io.StringIO()
    transfer_report.show(measured, Report(Console(file=out), width))
    return out.getvalue()


def test_without_a_terminal_a_method_is_one_line_with_all_figures() -> None:
    (line,) = [line for line in _shown(transfer((0.1, 0.5, 0.05)), None).splitlines() if "(c)" in line]
    assert re.split("  +", line) == ["(c) memcpy", "5.37 GB/s", "5.37-5.37", "100.0 ms", "1.00", "0.20-2.00"]


def test_80_columns_show_all_figures_but_the_range_of_speed() -> None:
    assert "A wider terminal also shows: range of speed.\n" in _shown(transfer((0.1, 0.5, 0.05)))


def test_the_ratio_is_the_median_of_ratios_within_rounds() -> None:
    ferry, other = MoverRounds("f", 10, (1.0, 10.0, 4.0)), MoverRounds("o", 20, (4.0, 10.0, 4.0))
    assert ferry.speed_ratio(other) == Spread(median=0.5, low=0.5, high=2.0)


@pytest.mark.parametrize(("seconds", "verdict"), [(0.11, "reached"), (0.12, "missed")])
def test_the_target_is_nine_tenths_of_raw_nixl_with_the_same_descriptors(
    seconds: float, verdict: str
) -> None:
    line = next(line for line in _shown(transfer((seconds,) * 3)).splitlines() if "target 0.9" in line)
    assert line.endswith(verdict)


def test_json_holds_every_round() -> None:
    loaded = json.loads(json.dumps(transfer_report.as_json(transfer((0.1, 0.2, 0.4)))))
    assert loaded["comparison"]["ferry"]["seconds"] == [0.1, 0.2, 0.4]
    assert loaded["kvferry_as_multiple_of"]["(c) memcpy"]["median"] == pytest.approx(0.5)
