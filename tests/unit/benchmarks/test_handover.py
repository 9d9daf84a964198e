"""The reports of `benchmarks handover` and `benchmarks steps`."""

from __future__ import annotations

import io
from contextlib import contextmanager
from dataclasses import asdict

import pytest
from rich.console import Console

from benchmarks.handover import report as handover_report
from benchmarks.handover.command import parse_loads
from benchmarks.handover.engine import Stamps
from benchmarks.handover.measure import Handover, Load, Result, measure_load, meet
from benchmarks.handover.model import MODELS
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
    text = said(lambda console: handover_report.show(MODELS[1], found, console, served=False))
    assert "+1.5" in text
    assert "stages, medians" in text
    assert "nixl+: NixlConnector with a sleeping progress thread" in text
    (load,) = handover_report.as_json({"gemma3": found}, served=False)["gemma3"]
    assert (load["tokens"], load["served"], len(load["connectors"]["kvferry"])) == (512, False, 2)
    assert load["connectors"]["nixl+"][0] == [asdict(stamps())]


def test_report_of_servers_has_times_without_stages():
    ours, theirs = (Handover((Stamps(added=1.0, answered=1.0 + each),)) for each in (0.012, 0.0105))
    found = {Load(512, 1): {"kvferry": (ours, ours), "nixl+": (theirs, theirs)}}
    text = said(lambda console: handover_report.show(MODELS[1], found, console, served=True))
    assert "12.0 (12.0-12.0)" in text
    assert "+1.5" in text
    assert "over HTTP" in text
    assert "stages, medians" not in text
    (load,) = handover_report.as_json({"gemma3": found}, served=True)["gemma3"]
    assert load["served"]
    assert load["connectors"]["kvferry"][0] == [{"added": 1.0, "answered": 1.012}]


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
    found = measure_load(pairs, Load(16, 2), rounds=2)
    assert turns == ["kvferry", "nixl", "nixl+", "nixl", "nixl+", "kvferry", "nixl+", "kvferry", "nixl"]
    assert {name: len(times) for name, times in found.items()} == {"kvferry": 2, "nixl": 2, "nixl+": 2}


def test_pair_without_a_load_or_with_other_tokens_is_an_error():
    same = PlayedPair("kvferry", [])
    with pytest.raises(TransferError, match="nixl gave other first tokens than kvferry"):
        measure_load({"kvferry": same, "nixl": PlayedPair("nixl", [], 8)}, Load(16, 2), rounds=1)
    with pytest.raises(TransferError, match="nixl did not load a prompt of 16 tokens"):
        measure_load({"kvferry": same, "nixl": PlayedPair("nixl", [], loads=False)}, Load(16, 2), rounds=1)
    pair = PlayedPair("nixl", [], loads=False)
    with (
        pair.running(),
        pytest.raises(TransferError, match="the engines with nixl loaded none of 10 prompts"),
    ):
        meet("nixl", pair)


@pytest.mark.parametrize("text", ["512", "512x", "x8", "0x1", "512x0", "512x1,many"])
def test_load_that_cannot_be_parsed_is_named(text: str):
    with pytest.raises(ConfigError, match="is not tokens, x and requests"):
        parse_loads(text)
    assert parse_loads("512x1,2048x8") == [Load(512, 1), Load(2048, 8)]


def test_hooks_are_compared_without_the_engines_own_share():
    found = {
        "empty": [[50e-6], [60e-6]],
        "nixl": [[110e-6], [120e-6]],
        "kvferry": [[80e-6], [75e-6]],
    }
    text = said(lambda console: steps_report.show(found, 256, console))
    row = next(line for line in text.splitlines() if line.startswith("kvferry"))
    assert row.split() == ["kvferry", "78", "75-80", "22", "0.38", "(0.25-0.50)"]
