"""The report of loads by READs and through shared memory."""

from __future__ import annotations

import io
import json

from rich.console import Console

from benchmarks.shared import report
from benchmarks.shared.measure import LayoutTimes, MeasuredSharing
from kvferry.planning.strategy import Strategy
from kvferry.tools.measuring.rounds import MachineFacts

SECONDS = {
    Strategy.DIRECT: [1.0, 1.2, 0.8],
    Strategy.STAGED: [1.1, 1.1, 1.1],
    Strategy.SHARED: [0.1, 0.1, 0.2],
}
FOUND = MeasuredSharing(
    1 << 28,
    MachineFacts(128, "Some Long-named Processor 9654P 96-Core @ 3.70GHz", "tcp,self"),
    tuple(LayoutTimes(layout, SECONDS, "shared", 1.4e8) for layout in ("BLHNC", "LBNHC")),
)


def test_the_report_fits_80_columns_and_marks_what_the_planner_chose() -> None:
    out = io.StringIO()
    report.show(FOUND, Console(file=out, width=80, highlight=False))
    said = out.getvalue()
    assert max(map(len, said.splitlines())) <= 80
    assert "…" not in said
    assert [line.split()[1] for line in said.splitlines() if "chosen" in line] == ["shared", "shared"]
    assert "2.68 1.34-2.68" in said, "GB/s: median and range"
    assert "10.0 4.0-12.0" in said, "of direct, round by round"
    assert "at first contact: 0.14 GB/s" in said


def test_the_json_has_every_round() -> None:
    loaded = json.loads(json.dumps(report.as_json(FOUND)))
    assert loaded["layouts"][0]["seconds"]["shared"] == SECONDS[Strategy.SHARED]
    assert loaded["machine"]["transports"] == "tcp,self"
