"""What is said of chunks that an engine's tiers dropped."""

import pytest

from kvferry.doctor.drops import of_metrics
from kvferry.doctor.finding import State


def page(*, stored: int, **dropped: int) -> str:
    """The metrics of two engines at one address."""
    lines = [f'kvferry_tier_stored_chunks_total{{engine="{n}",tier="file"}} {stored / 2}' for n in range(2)]
    for name, count in dropped.items():
        reason = name.replace("_", " ")
        labels = f'engine="0",tier="file",reason="{reason}"'
        lines.append(f"kvferry_tier_dropped_chunks_total{{{labels}}} {count}")
    return "\n".join(["# TYPE kvferry_tier_dropped_chunks counter", *lines, 'other{tier="file"} 1'])


def test_a_tier_that_finds_no_space_is_bad():
    (found,) = of_metrics(page(stored=60, no_space_on_the_device=30, left_host_memory_before_its_turn=10))
    assert (found.subject, found.state) == ("tier file", State.BAD)
    assert found.found == (
        "40 of 100 chunks dropped since the engine started: no space on the device 30, "
        "left host memory before its turn 10"
    )


@pytest.mark.parametrize("dropped", [{"left_host_memory_before_its_turn": 50}, {"ledger_held_by_others": 1}])
def test_a_tier_that_is_too_slow_or_dropped_few_chunks_is_noted(dropped):
    (found,) = of_metrics(page(stored=1000, **dropped))
    assert found.state is State.NOTE


@pytest.mark.parametrize("text", ["", page(stored=10), page(stored=10, no_space_on_the_device=0)])
def test_an_engine_that_drops_nothing_has_no_finding(text):
    assert of_metrics(text) == []
