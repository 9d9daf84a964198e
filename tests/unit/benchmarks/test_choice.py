"""What is reported of policies follows from what engines answered, and fits a terminal."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from benchmarks.choice import report as choice_report
from benchmarks.choice.measure import ChoiceJob, MeasuredChoice, Replay, SourceSpeeds
from benchmarks.choice.policy_engine import CompletedLoad, LoadListener, ReplayAnswer
from benchmarks.choice.workload import Prompt, Workload
from kvferry.connector.bids import PlaceTokens
from kvferry.connector.events import EventStream, LoadBegan, LoadEnded, LoadOutcome
from kvferry.tools.measuring.rounds import MachineFacts, Spread
from support.load_events import load_began, load_ended

WORKLOAD = Workload("drawn conversations", 64, (Prompt((0, 1), 100), Prompt((0, 1, 2), 192)))
NEAR = ReplayAnswer(192, 0.02, (CompletedLoad({"file": 128}, 0.01),), 0)
FAR = ReplayAnswer(192, 0.2, (CompletedLoad({"far object": 128}, 0.1),), 0)


def replayed(*seconds: float, answer: ReplayAnswer = NEAR) -> Replay:
    return Replay(tuple(replace(answer, seconds=one) for one in seconds))


def measured(cost: float = 0.06, *, failed: int = 0) -> MeasuredChoice:
    rounds = {
        "weight": (replayed(0.1, 0.1, answer=FAR), replayed(0.2, 0.2, answer=FAR)),
        "first": (replayed(0.05, 0.1), Replay((ReplayAnswer(100, 0.05, (), failed), NEAR))),
        "cost": (replayed(cost, cost), replayed(cost, cost)),
    }
    learning = {policy: replayed(1.0, 1.0) for policy in rounds}
    return MeasuredChoice(
        job=ChoiceJob(
            workload=WORKLOAD, sources="connectors", apart=20.0, near=0.25, rounds=2, path=Path("/tmp")
        ),
        machine=MachineFacts(128, "Some Long-named Processor 9654P 96-Core @ 3.70GHz", None),
        probed=SourceSpeeds(Spread(12_600e6, 11_000e6, 13_000e6), Spread(631e6, 600e6, 632.4e6), 700e6),
        learning=learning,
        rounds=rounds,
    )


def shown(of: MeasuredChoice) -> str:
    out = io.StringIO()
    choice_report.show(of, Console(file=out, width=80, highlight=False))
    return out.getvalue()


def test_report_fits_80_columns_and_cuts_off_no_text() -> None:
    text = shown(measured(failed=2))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "20.0x apart (asked for: 20x)" in " ".join(text.split())


def test_a_ratio_is_of_the_means_of_a_round() -> None:
    found = measured().ratio("weight")
    assert (found.low, found.high) == (pytest.approx(0.3), pytest.approx(0.6))
    assert "cost / weight: 0.45 (0.30-0.60); 1.00 while it learns" in shown(measured())


@pytest.mark.parametrize(("cost", "says"), [(0.045, "reached"), (0.06, "missed")])
def test_cost_must_be_no_slower_than_either(cost: float, says: str) -> None:
    assert f"target at most 1 of either: {says}" in shown(measured(cost))


def test_report_lists_sources_of_tokens_and_the_rest_as_computed() -> None:
    assert measured().served("first") == {"computed": (128 + 164) / 2, "file": (256 + 128) / 2}
    lines = [line.split() for line in shown(measured()).splitlines()]
    assert ["weight", "150", "ms", "(100", "ms-200", "ms)", "33.3%", "0.0%", "66.7%"] in lines


def test_rates_count_loads_from_one_tier_only() -> None:
    both = CompletedLoad({"file": 64, "object": 64}, 1.0)
    one = measured()
    rounds = {**one.rounds, "cost": (Replay((ReplayAnswer(192, 1.0, (both,), 0),)),) * 2}
    rates = replace(one, rounds=rounds).rates
    assert set(rates) == {"computed", "file", "far object"}
    assert [rates[name].median for name in rates] == pytest.approx([2000, 1280, 12_800])


def test_loads_that_failed_are_not_hidden() -> None:
    assert "failed" not in shown(measured())
    assert "2 loads failed, and were computed; their time is in it" in shown(measured(failed=2))


def test_json_has_every_request() -> None:
    loaded = json.loads(json.dumps(choice_report.as_json(measured())))
    assert loaded["policies"]["weight"]["rounds"][1]["seconds"] == [0.2, 0.2]
    assert loaded["policies"]["weight"]["rounds"][0]["served"] == {"far object": 256, "computed": 128}
    assert loaded["ratio"]["cost / first"]["median"] > 1
    assert loaded["reached"] is False


def test_files_have_room_for_a_share_and_for_the_longest_prompt() -> None:
    job = measured().job
    each = 2 * 2 * 8 * 8 * 64
    assert job.file_bytes == 240 * each
    assert replace(
        job, near=1.0, workload=replace(WORKLOAD, prompts=(Prompt((0, 1), 100),) * 3)
    ).file_bytes == (128 * each)


def began(load: str, *parts: PlaceTokens) -> LoadBegan:
    return load_began(load, "tiers", end=100, at=1.0, parts=parts)


def ended(load: LoadBegan, outcome: LoadOutcome) -> LoadEnded:
    return load_ended(load, outcome=outcome, at=1.5)


def test_loaded_tokens_are_counted_per_connector_and_tier() -> None:
    near, far = (SimpleNamespace(events=EventStream()) for _ in range(2))
    seen = LoadListener([near, far])
    file = began("a", PlaceTokens("file", 100))
    others = began("a", PlaceTokens("host", 20), PlaceTokens("object", 80))
    near.events.emit(file)
    far.events.emit(others)
    near.events.emit(ended(file, LoadOutcome.FAILED))
    far.events.emit(ended(others, LoadOutcome.READY))
    assert seen.take() == ((CompletedLoad({"far host": 20, "far object": 80}, 0.5),), 1)
    assert seen.take() == ((), 0)
