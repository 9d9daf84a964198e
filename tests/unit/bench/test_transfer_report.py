"""What is reported follows from what was measured, and fits a terminal."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from kvferry.bench import transfer_report
from kvferry.bench.rounds import MoverRounds, TransferComparison
from kvferry.bench.transfer import MeasuredTransfer, TransferJob
from kvferry.measuring.machine import MachineFacts
from kvferry.measuring.simulated import read_geometry
from kvferry.measuring.spread import Spread
from kvferry.plan.side import EngineSide


def _measured(ferry_seconds: tuple[float, ...]) -> MeasuredTransfer:
    size = 512 << 20
    raw = tuple(
        MoverRounds(name, size, (0.1, 0.1, 0.1))
        for name in ("(a) raw NIXL, 2 MiB descriptors", "(b) raw NIXL, same descriptors", "(c) memcpy")
    )
    return MeasuredTransfer(
        job=TransferJob(
            reading=read_geometry("Llama-3.1-8B"),
            side=EngineSide(),
            tokens=4096,
            order="scattered",
            repeats=9,
        ),
        blocks=256,
        layers=32,
        page_bytes=64 << 10,
        machine=MachineFacts(
            128, "Some Long-named Processor 9654P 96-Core @ 3.70GHz", "rc,cuda_copy,cuda_ipc,sm,self"
        ),
        comparison=TransferComparison(
            MoverRounds("kvferry", size, ferry_seconds), raw, (1e-3, 0.1, 1e-3, 1e-3)
        ),
    )


def _shown(measured: MeasuredTransfer) -> str:
    out = io.StringIO()
    transfer_report.show(measured, Console(file=out, width=80, highlight=False))
    return out.getvalue()


def test_it_fits_80_columns_and_cuts_nothing_off() -> None:
    shown = _shown(_measured((0.1, 0.5, 0.05)))
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown


def test_the_ratio_is_the_median_of_ratios_within_rounds() -> None:
    ferry, other = MoverRounds("f", 10, (1.0, 10.0, 4.0)), MoverRounds("o", 20, (4.0, 10.0, 4.0))
    assert ferry.speed_ratio(other) == Spread(median=0.5, low=0.5, high=2.0)


@pytest.mark.parametrize(("seconds", "verdict"), [(0.11, "reached"), (0.12, "missed")])
def test_the_target_is_nine_tenths_of_raw_nixl_with_the_same_descriptors(
    seconds: float, verdict: str
) -> None:
    line = next(line for line in _shown(_measured((seconds,) * 3)).splitlines() if "target 0.9" in line)
    assert line.endswith(verdict)


def test_json_holds_every_round() -> None:
    loaded = json.loads(json.dumps(transfer_report.as_json(_measured((0.1, 0.2, 0.4)))))
    assert loaded["comparison"]["ferry"]["seconds"] == [0.1, 0.2, 0.4]
    assert loaded["kvferry_as_multiple_of"]["(c) memcpy"]["median"] == pytest.approx(0.5)
