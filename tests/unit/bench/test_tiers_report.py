"""What is reported of tiers follows from what was measured."""

from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console

from kvferry.tools.bench import tiers as tiers_report
from kvferry.tools.bench.rounds import TierCase, measure_cases
from kvferry.tools.bench.tiers import MeasuredTiers
from kvferry.tools.measuring.rounds import Spread
from kvferry.tools.report import Report
from support.bench_results import tier_speed, tiers


def shown(of: MeasuredTiers, width: int | None = 80) -> str:
    out = io.StringIO()
    tiers_report.show(of, Report(Console(file=out), width))
    return out.getvalue()


def test_without_a_terminal_a_case_is_one_line_with_all_figures() -> None:
    line = next(line for line in shown(tiers(tier_speed(0.1, 8)), None).splitlines() if " 8 " in line)
    assert re.split("  +", line) == [
        "host, LBNHC", "store", "8", "5.37 GB/s", "5.37 GB/s", "1.00", "1.00-1.00", "0.8", "yes", "fio",
    ]  # fmt: skip


def test_80_columns_show_all_but_the_target_and_the_name_of_the_limit() -> None:
    assert "A wider terminal also shows: target, limited by.\n" in shown(tiers(tier_speed(0.1)))


def test_the_limit_is_the_fastest_by_the_median() -> None:
    assert tier_speed(0.2).limit.name == "fio"
    assert tier_speed(0.2).ratio == Spread(0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("seconds", "target", "reached"), [(0.12, 0.8, True), (0.13, 0.8, False), (0.14, 0.7, True)]
)
def test_the_target_is_a_share_of_the_limit(seconds: float, target: float, reached: bool) -> None:
    assert tier_speed(seconds, target=target).reached is reached


def test_report_explains_results_and_the_gain_of_depth() -> None:
    text = " ".join(shown(tiers(tier_speed(0.2), tier_speed(0.1, 8))).split())
    assert "host, LBNHC store 8: 2.00x memcpy in runs of 8 KiB: 0.62" in text


def test_json_has_the_rounds_and_what_follows_from_them() -> None:
    loaded = json.loads(json.dumps(tiers_report.as_json(tiers(tier_speed(0.2)))))
    (one,) = loaded["speeds"]
    assert one["ours"]["seconds"] == [0.2] * 3
    assert (one["limit"], one["ratio"]["median"], one["reached"]) == ("fio", 0.5, False)


class Counted:
    """Takes as long as it is told, and counts how often it was asked."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name, self.bytes, self.seconds, self.moves = name, 10, seconds, 0

    def move(self) -> float:
        self.moves += 1
        return self.seconds


def test_every_round_runs_all_movers_and_each_keeps_its_own_times() -> None:
    movers = [Counted(name, seconds) for name, seconds in (("a", 1.0), ("b", 2.0), ("c", 3.0), ("d", 4.0))]
    a, b, c, d = movers
    first, second = measure_cases(
        [
            TierCase(tier="host", direction="store", depth=1, target=0.8, ours=a, limits=(b,), controls=(c,)),
            TierCase(tier="host", direction="load", depth=1, target=0.8, ours=d, limits=(a,)),
        ],
        7,
        lambda _: None,
    )
    assert (first.ours.seconds, first.limit.seconds, first.controls[0].seconds) == (
        (1.0,) * 7,
        (2.0,) * 7,
        (3.0,) * 7,
    )
    assert (second.ours.seconds, second.limit.name) == ((4.0,) * 7, "a")
    assert [mover.moves for mover in movers] == [16, 8, 8, 8]
