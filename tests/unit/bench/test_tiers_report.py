"""What is reported of tiers follows from what was measured, and fits a terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from kvferry.bench import tiers_report
from kvferry.bench.rounds import MoverRounds
from kvferry.bench.tier_cases import TierCase, TierSpeed, measure_cases
from kvferry.bench.tiers import MeasuredTiers, TiersJob
from kvferry.measuring.machine import MachineFacts
from kvferry.measuring.simulated import read_geometry
from kvferry.measuring.spread import Spread
from kvferry.plan.side import EngineSide

SIZE = 512 << 20


def speed(ours: float, depth: int = 1, target: float = 0.8, tier: str = "host, LBNHC") -> TierSpeed:
    """Beside limits that take 0.1 and 0.2 seconds."""
    slow, fast = (MoverRounds(name, SIZE, (s,) * 3) for name, s in (("threads, O_DIRECT", 0.2), ("fio", 0.1)))
    control = MoverRounds("memcpy in runs of 8 KiB", SIZE, (0.16,) * 3)
    return TierSpeed(
        tier=tier,
        direction="store",
        depth=depth,
        target=target,
        ours=MoverRounds("kvferry", SIZE, (ours,) * 3),
        limits=(slow, fast),
        controls=(control,),
    )


def measured(*speeds: TierSpeed) -> MeasuredTiers:
    return MeasuredTiers(
        job=TiersJob(
            reading=read_geometry("Llama-3.1-8B"),
            sides=(EngineSide(layout="LBNHC"),),
            depths=(1, 8),
            repeats=7,
            path=Path("/tmp"),
        ),
        machine=MachineFacts(128, "Some Long-named Processor 9654P 96-Core @ 3.70GHz", None),
        chunk_tokens=256,
        chunk_bytes=16 << 20,
        speeds=speeds,
    )


def shown(of: MeasuredTiers) -> str:
    out = io.StringIO()
    tiers_report.show(of, Console(file=out, width=80, highlight=False))
    return out.getvalue()


def test_it_fits_80_columns_and_cuts_nothing_off() -> None:
    text = shown(measured(speed(0.1), speed(0.004, 256)))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text


def test_the_limit_is_the_fastest_by_the_median() -> None:
    assert speed(0.2).limit.name == "fio"
    assert speed(0.2).ratio == Spread(0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("seconds", "target", "reached"), [(0.12, 0.8, True), (0.13, 0.8, False), (0.14, 0.7, True)]
)
def test_the_target_is_a_share_of_the_limit(seconds: float, target: float, reached: bool) -> None:
    assert speed(seconds, target=target).reached is reached


def test_what_explains_a_result_and_what_depth_brings_are_said() -> None:
    text = " ".join(shown(measured(speed(0.2), speed(0.1, 8))).split())
    assert "host, LBNHC store 8: 2.00x memcpy in runs of 8 KiB: 0.62" in text


def test_json_has_the_rounds_and_what_follows_from_them() -> None:
    loaded = json.loads(json.dumps(tiers_report.as_json(measured(speed(0.2)))))
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
