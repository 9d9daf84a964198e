"""What is reported of a request's overhead follows from what was measured, and fits a terminal."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from benchmarks.overhead import readiness, report
from benchmarks.overhead.hooks import HookTimes
from benchmarks.overhead.measure import MeasuredOverhead, OverheadJob
from benchmarks.overhead.planning import PlanningTimes
from benchmarks.overhead.readiness import Readiness
from kvferry.tools.measuring.rounds import MachineFacts, Spread
from kvferry.tools.measuring.simulated import read_geometry


def _measured(planning_ms: float = 1.0, ready_ms: float = 30.0) -> MeasuredOverhead:
    wide = Spread(planning_ms / 1e3, 108.53e-3, 1162.35e-3)
    return MeasuredOverhead(
        job=OverheadJob(reading=read_geometry("Llama-3.1-8B")),
        machine=MachineFacts(
            128, "Some Long-named Processor 9654P 96-Core @ 3.70GHz", "rc,cuda_copy,cuda_ipc,sm"
        ),
        planning=PlanningTimes(
            tokens=131_072,
            pages=262_144,
            strategies=("direct",),
            tables=wide,
            plan=wide,
            ours=wide,
            chunks=wide,
        ),
        making=wide,
        readiness=tuple(
            Readiness(
                model=name,
                parallel=(4, 16),
                blocks=(12_345, 6_789),
                descriptors=1_234_567,
                seconds=Spread(ready_ms / 1e3, 1e-3, ready_ms / 1e3),
            )
            for name in ("Nemotron-3-Nano-30B-A3B", "Kimi-K3")
        ),
        hooks=HookTimes(steps=1500, loads=40, in_flight=4, tokens=1024, median=3e-6, p99=4e-5, longest=0.048),
    )


def _shown(measured: MeasuredOverhead) -> str:
    out = io.StringIO()
    report.show(measured, Console(file=out, width=80, highlight=False))
    return out.getvalue()


def test_report_fits_80_columns_and_cuts_off_no_text() -> None:
    shown = _shown(_measured())
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown


@pytest.mark.parametrize(("milliseconds", "verdict"), [(4.9, "reached"), (5.1, "missed")])
def test_the_target_of_planning_is_five_milliseconds(milliseconds: float, verdict: str) -> None:
    shown = _shown(_measured(milliseconds))
    line = next(line for line in shown.splitlines() if "under 5 ms" in line)
    assert line.rstrip().endswith(verdict)


@pytest.mark.parametrize(("milliseconds", "verdict"), [(199, "reached"), (201, "missed")])
def test_the_target_of_getting_ready_is_a_fifth_of_a_second(milliseconds: float, verdict: str) -> None:
    shown = _shown(_measured(ready_ms=milliseconds))
    line = next(line for line in shown.splitlines() if "target 200 ms" in line)
    assert line.rstrip().endswith(verdict)


def test_getting_ready_is_measured_with_few_common_runs() -> None:
    found = readiness.measure(1)
    assert {each.blocks for each in found} == {(5760, 2944), (2944, 5760), (2096, 1056), (1056, 2096)}
    # A row for each cell of a block on either side; of all pairs of them there would be millions of entries.
    assert all(0 < each.descriptors < 200_000 for each in found)
    assert all(each.seconds.median > 0 for each in found)


def test_json_holds_every_figure() -> None:
    loaded = json.loads(json.dumps(report.as_json(_measured())))
    assert loaded["hooks"]["longest"] == 0.048
    assert loaded["planning"]["plan"]["median"] == loaded["making"]["median"] == 1e-3
    assert len(loaded["readiness"]) == 2
