"""The reports of `benchmarks handover` and `benchmarks steps`."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchmarks.handover import report as handover_report
from benchmarks.handover.command import _loads
from benchmarks.handover.engine import Stamps
from benchmarks.handover.measure import Handover, Load
from benchmarks.handover.model import MODELS
from benchmarks.steps import report as steps_report
from kvferry.errors import ConfigError


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
    text = said(lambda console: handover_report.show(MODELS[1], found, console))
    assert "+1.5" in text
    assert "nixl+: NixlConnector with a sleeping progress thread" in text
    (load,) = handover_report.as_json({"gemma3": found})["gemma3"]
    assert (load["tokens"], len(load["connectors"]["kvferry"])) == (512, 2)


@pytest.mark.parametrize("text", ["512", "512x", "x8", "0x1", "512x0", "512x1,many"])
def test_a_load_that_is_none_is_named(text: str):
    with pytest.raises(ConfigError, match="is not tokens, x and requests"):
        _loads(text)
    assert _loads("512x1,2048x8") == [Load(512, 1), Load(2048, 8)]


def test_hooks_are_compared_without_the_engines_own_share():
    found = {
        "empty": [[50e-6], [60e-6]],
        "nixl": [[110e-6], [120e-6]],
        "kvferry": [[80e-6], [75e-6]],
    }
    text = said(lambda console: steps_report.show(found, 256, console))
    row = next(line for line in text.splitlines() if line.startswith("kvferry"))
    assert row.split() == ["kvferry", "78", "75-80", "22", "0.38", "(0.25-0.50)"]
