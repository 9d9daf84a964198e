"""The reports of `benchmarks handover` and `benchmarks steps`."""

from __future__ import annotations

import io
import json
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.conditions import QUIET, Conditions, CpuTimes, watched
from benchmarks.handover import report as handover_report
from benchmarks.handover.command import parse_pairs, parse_ranks
from benchmarks.handover.engine import Setup, Stamps
from benchmarks.handover.measure import (
    FirstTokens,
    Handover,
    Load,
    Measured,
    Result,
    Turns,
    measure,
    measure_work,
    meet,
)
from benchmarks.handover.mix import Mix, MixTimes, TokenTimes
from benchmarks.handover.model import MODELS
from benchmarks.handover.page import summary as handover_page
from benchmarks.handover.verdict import compare, runs_of
from benchmarks.steps import report as steps_report
from kvferry.common.errors import ConfigError, TransferError


def stamps(shift: float = 0.0) -> Stamps:
    """One request, whose token comes 10 ms plus `shift` after it."""
    return Stamps(
        added=1.0, asked=1.001, allocated=1.002, started=1.003,
        received=1.006 + shift, answered=1.010 + shift, transfer_seconds=0.0015, check_seconds=0.0002,
    )  # fmt: skip


def said(show) -> str:
    console = Console(file=io.StringIO(), width=80, highlight=False)
    show(console)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    return text


def test_the_stages_of_a_hand_over_add_up_to_its_time():
    one = Handover((stamps(), stamps(0.002)))
    assert one.seconds == pytest.approx(0.011)
    assert sum(one.stages().values()) == pytest.approx(one.seconds)
    assert one.stages()["look-up"] == pytest.approx(0.002)
    assert one.stages()["other"] == pytest.approx(0.0023)


def test_the_difference_to_the_peer_with_the_same_advantages_is_of_rounds():
    ours, theirs = Handover((stamps(0.003),)), Handover((stamps(),))
    found = {Load(512, 1): {"kvferry": (ours, ours), "nixl": (ours, ours), "nixl+": (theirs, ours)}}
    text = said(lambda console: handover_report.show(MODELS[1], Measured(found), console, served=False))
    assert "+1.5" in text
    assert "stages, medians" in text
    assert "nixl+: NixlConnector with a sleeping progress thread" in text
    (load,) = handover_report.as_json({"gemma3": Measured(found)}, served=False)["gemma3"]
    assert (load["tokens"], load["served"], len(load["connectors"]["kvferry"])) == (512, False, 2)
    assert load["connectors"]["nixl+"][0]["stamps"] == [asdict(stamps())]


def test_report_of_servers_has_times_without_stages():
    ours, theirs = (Handover((Stamps(added=1.0, answered=1.0 + each),)) for each in (0.012, 0.0105))
    found = {Load(512, 1): {"kvferry": (ours, ours), "nixl+": (theirs, theirs)}}
    text = said(lambda console: handover_report.show(MODELS[1], Measured(found), console, served=True))
    assert "12.0 (12.0-12.0)" in text
    assert "+1.5" in text
    assert "over HTTP" in text
    assert "stages, medians" not in text
    (load,) = handover_report.as_json({"gemma3": Measured(found)}, served=True)["gemma3"]
    assert load["served"]
    assert load["connectors"]["kvferry"][0]["stamps"] == [{"added": 1.0, "answered": 1.012}]


WORKED = Conditions(cpu_seconds=1.0)
BUSY = Conditions(before=0.3, cpu_seconds=2.0)


def handover(seconds: float, conditions: Conditions = QUIET) -> Handover:
    return Handover((Stamps(added=1.0, answered=1.0 + seconds),), conditions)


def test_rounds_on_a_busy_machine_are_left_out_of_a_ratio():
    theirs = [handover(0.5, BUSY), *(handover(each) for each in (0.1, 0.2, 0.1, 0.1))]
    ours = [*(handover(each) for each in (0.2, 0.2, 0.2, 0.3)), handover(0.4, BUSY)]
    found = {"kvferry": ours, "nixl+": theirs}
    verdict = compare(found, "nixl+", lambda one: one.seconds)
    assert verdict.rounds == (1, 2, 3)
    assert (verdict.ratio.median, verdict.ratio.low, verdict.ratio.high) == pytest.approx((2.0, 1.0, 3.0))
    found["kvferry"][1] = handover(0.2, BUSY)
    assert compare(found, "nixl+", lambda one: one.seconds).reason == "the machine was busy in 3 of 5 rounds"
    assert sum(runs_of(found)["kvferry"].quiet) == 3


@pytest.mark.parametrize("stalls", ["kvferry", "nixl+"])
def test_row_with_a_stall_has_the_reason_in_place_of_a_ratio(stalls: str):
    found = {name: [handover(0.1)] * 3 for name in ("kvferry", "nixl+", "nixl")}
    found[stalls] = [handover(0.1), handover(12.3), handover(2.0)]
    verdict = compare(found, "nixl+", lambda one: one.seconds)
    assert (verdict.ratio, verdict.reason) == (None, f"{stalls} stalled in 2 of 3 rounds, up to 12.3 s")
    text = said(
        lambda console: handover_report.show(MODELS[0], Measured({Load(512, 1): found}), console, served=True)
    )
    assert "512x1: not comparable with nixl+:" in text
    # What takes long for all is no stall.
    slow = {name: [handover(3.0), handover(9.0)] for name in ("kvferry", "nixl+")}
    assert compare(slow, "nixl+", lambda one: one.seconds).reason == ""


def test_share_of_other_processes_is_what_the_benchmark_did_not_use():
    times = iter([
        CpuTimes(total=100.0, busy=50.0, stolen=1.0, own=10.0),
        CpuTimes(total=101.0, busy=50.5, stolen=1.0, own=10.25),
        CpuTimes(total=111.0, busy=56.5, stolen=1.2, own=15.25),
    ])  # fmt: skip
    slept: list[float] = []
    with watched(lambda: next(times), slept.append) as round_:
        assert slept == [pytest.approx(0.2)]
    conditions = round_.conditions
    assert (conditions.before, conditions.during, conditions.stolen) == pytest.approx((0.25, 0.1, 0.02))
    assert conditions.cpu_seconds == pytest.approx(5.0)
    assert not conditions.quiet
    assert Conditions.of(Conditions(0.1, 0.05, 0.02).as_json()).quiet
    assert not Conditions(stolen=0.03).quiet


def test_conditions_of_this_machine_are_shares():
    with watched(sleep=lambda _: None) as round_:
        sum(range(100_000))
    assert all(0 <= share < 2 for share in round_.conditions.as_json().values())


class PlayedPair:
    """A pair that answers with tokens of its own, and notes its turns in a list."""

    def __init__(self, name: str, turns: list[str], token: int = 7, *, loads: bool = True) -> None:
        self.name, self.turns, self.token, self.loads = name, turns, token, loads
        self.paused = True

    @contextmanager
    def running(self):
        self.paused = False
        try:
            yield
        finally:
            self.paused = True

    def hand_over(self, prompts):
        assert not self.paused
        self.turns.append(self.name)
        return Result(Handover((stamps(),)), [self.token for _ in prompts], self.loads)


def test_pairs_take_turns_in_a_rotating_order_and_the_first_round_does_not_count():
    turns: list[str] = []
    pairs = {name: PlayedPair(name, turns) for name in ("kvferry", "nixl", "nixl+")}
    found = measure_work(pairs, Load(16, 2), rounds=2)
    assert turns == ["kvferry", "nixl", "nixl+", "nixl", "nixl+", "kvferry", "nixl+", "kvferry", "nixl"]
    assert {name: len(times) for name, times in found.items()} == {"kvferry": 2, "nixl": 2, "nixl+": 2}


def test_pairs_of_servers_run_one_at_a_time_in_sittings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("benchmarks.handover.measure.write_model", lambda *_: tmp_path)
    running: list[str] = []
    started: list[str] = []
    turns: list[str] = []

    @contextmanager
    def start(setup: Setup):
        assert running == []
        running.append(setup.connector)
        started.append(setup.connector)
        yield PlayedPair(setup.connector, turns)
        running.clear()

    measured = measure(
        MODELS[0], [Load(16, 2), Load(32, 1)], ["kvferry", "nixl+"], start,
        turns=Turns(rounds=2, sittings=2), folder=tmp_path, progress=lambda _: None,
    )  # fmt: skip
    assert started == ["kvferry", "nixl+", "nixl+", "kvferry"]
    assert [
        (load, name, len(times)) for load, by in measured.found.items() for name, times in by.items()
    ] == [(load, name, 4) for load in (Load(16, 2), Load(32, 1)) for name in ("kvferry", "nixl+")]
    # One prompt to meet, and a round that does not count, in each sitting.
    assert turns.count("kvferry") == 2 * (1 + 2 * 3)


def test_peer_that_fails_in_a_sitting_is_named_and_the_others_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.handover.measure.write_model", lambda *_: tmp_path)
    started: list[str] = []

    @contextmanager
    def start(setup: Setup, *, failing: str = "nixl+"):
        started.append(setup.connector)
        if setup.connector == failing and started.count(failing) == 2:
            raise TransferError("no room")
        yield PlayedPair(setup.connector, [])

    def run(start) -> Measured:
        names, turns = ["kvferry", "nixl+", "nixl"], Turns(rounds=1, sittings=3)
        rest = {"turns": turns, "folder": tmp_path, "progress": lambda _: None}
        return measure(MODELS[0], [Load(16, 2)], names, start, **rest)

    measured = run(start)
    assert measured.failures == {"nixl+": "no room"}
    assert {name: len(times) for name, times in measured.found[Load(16, 2)].items()} == {
        "kvferry": 3,
        "nixl": 3,
    }
    assert started.count("nixl+") == 2
    text = said(lambda console: handover_report.show(MODELS[0], measured, console, served=True))
    assert "nixl+ failed: no room" in text
    document = handover_report.as_json({"qwen3": measured}, served=True)
    *_, row = handover_page(json.loads(json.dumps(document))).comparisons
    assert (row.label, row.against, row.theirs, row.ratio) == ("qwen3, 16 x 2", "nixl+", "no room", None)
    started.clear()
    with pytest.raises(TransferError, match="no room"):
        run(partial(start, failing="kvferry"))


def test_first_tokens_are_compared_over_sittings():
    said = FirstTokens()
    said.check("kvferry", Load(16, 2), 1, [7, 8])
    said.check("nixl", Load(16, 2), 1, [7, 9])  # bfloat16 may flip one
    said.check("nixl", Load(16, 2), 2, [1, 2])
    with pytest.raises(TransferError, match=r"nixl\+ gave other first tokens than kvferry"):
        said.check("nixl+", Load(16, 2), 1, [3, 4])


def mix_times(first: float, gap: float, conditions: Conditions = QUIET) -> MixTimes:
    """Four requests of three tokens from two clients; the second token of each comes late."""
    starts = (1.0, 1.0, 1.0 + first + 3 * gap, 1.0 + first + 3 * gap)
    return MixTimes(
        tuple(TokenTimes(at, (at + first, at + first + 2 * gap, at + first + 3 * gap)) for at in starts),
        conditions=conditions,
    )


def test_figures_of_a_mix_are_throughput_and_waits():
    times = mix_times(0.4, 0.1)
    assert times.seconds == pytest.approx(1.4)
    assert (times.tokens, times.wait) == (12, pytest.approx(0.4))
    figures = times.figures()
    assert figures["time per request"] == pytest.approx(0.35)
    assert figures["time to first token, p50"] == pytest.approx(0.4)
    assert figures["time between tokens, p50"] == pytest.approx(0.15)
    assert figures["time between tokens, p99"] == pytest.approx(0.2)


def test_report_of_a_mix_has_throughput_waits_and_ratios():
    found = {
        Mix(4, 2): {
            "kvferry": (mix_times(0.4, 0.1, WORKED), mix_times(0.5, 0.1, WORKED)),
            "nixl+": (mix_times(0.8, 0.2, WORKED), mix_times(0.8, 0.2, WORKED)),
            "aggregated": (mix_times(0.4, 0.1, BUSY), mix_times(0.4, 0.1, WORKED)),
        }
    }
    text = said(lambda console: handover_report.show(MODELS[0], Measured(found), console, served=True))
    row = next(line for line in text.splitlines() if line.startswith("nixl+ "))
    assert row.split() == ["nixl+", "1.4", "4.3", "800.0", "800.0", "300.0", "400.0"]
    assert "time per request: kvferry / nixl+: 0.54 (0.50-0.57)" in text
    assert "kvferry / aggregated: the machine was busy in 1 of 2 rounds" in text
    assert "CPU time per request: kvferry / aggregated: 0.75 (0.50-1.00)" in text, "busy rounds count"
    assert "mix 4x2" in text
    (work,) = handover_report.as_json({"qwen3": Measured(found)}, served=True)["qwen3"]
    assert (work["kind"], work["requests"], work["clients"]) == ("mix", 4, 2)
    assert work["connectors"]["kvferry"][0]["requests"][0]["tokens"] == pytest.approx([1.4, 1.6, 1.7])
    rows = handover_page({"qwen3": [json.loads(json.dumps(work))]}).comparisons
    first = rows[0]
    assert (first.label, first.against) == ("qwen3, 4 requests, 2 clients: time per request", "nixl+")
    assert (first.ours, first.theirs) == ("2.68 requests/s, 8 tokens/s", "1.43 requests/s, 4 tokens/s")
    assert first.ratio.median == pytest.approx(0.5357, abs=1e-3)
    assert (rows[1].against, rows[1].ratio) == ("one server", None)


def test_requests_of_a_mix_depend_on_the_round_alone():
    mix = Mix(40, 8)
    drawn = mix.draw(1)
    assert drawn == mix.draw(1)
    assert drawn != mix.draw(2)
    lengths = [len(one.prompt) for one in drawn]
    assert 128 <= min(lengths) < 256
    assert 1024 < max(lengths) <= 2048
    assert all(16 <= one.answer <= 64 for one in drawn)
    assert max(len(one.prompt) + one.answer for one in drawn) <= mix.longest


def test_pair_without_a_load_or_with_other_tokens_is_an_error():
    same = PlayedPair("kvferry", [])
    with pytest.raises(TransferError, match="nixl gave other first tokens than kvferry"):
        measure_work({"kvferry": same, "nixl": PlayedPair("nixl", [], 8)}, Load(16, 2), rounds=1)
    with pytest.raises(TransferError, match="nixl did not load a prompt of 16 tokens"):
        measure_work({"kvferry": same, "nixl": PlayedPair("nixl", [], loads=False)}, Load(16, 2), rounds=1)
    pair = PlayedPair("nixl", [], loads=False)
    with (
        pair.running(),
        pytest.raises(TransferError, match="the engines with nixl loaded none of 10 prompts"),
    ):
        meet("nixl", pair)


@pytest.mark.parametrize("text", ["512", "512x", "x8", "0x1", "512x0", "512x1,many"])
def test_load_that_cannot_be_parsed_is_named(text: str):
    with pytest.raises(ConfigError, match="is not tokens, x and requests"):
        parse_pairs(text, "loads", Load)
    assert parse_pairs("512x1,2048x8", "loads", Load) == [Load(512, 1), Load(2048, 8)]
    assert parse_pairs("48x8", "mix", Mix) == [Mix(48, 8)]


@pytest.mark.parametrize("text", ["1", "1:", "0:1", "1:x"])
def test_ranks_that_cannot_be_parsed_are_named(text: str):
    with pytest.raises(ConfigError, match="is not two numbers of ranks"):
        parse_ranks(text)
    assert parse_ranks("1:2") == (1, 2)


def test_hooks_are_compared_without_the_engines_own_share():
    found = {
        "empty": [[50e-6], [60e-6]],
        "nixl": [[110e-6], [120e-6]],
        "kvferry": [[80e-6], [75e-6]],
    }
    text = said(lambda console: steps_report.show(found, 256, console))
    row = next(line for line in text.splitlines() if line.startswith("kvferry"))
    assert row.split() == ["kvferry", "78", "75-80", "22", "0.38", "(0.25-0.50)"]
