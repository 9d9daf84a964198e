"""What is said of an engine's metrics, and of settings that turn snapshots for shared prefixes off."""

import pytest

from kvferry.connector.config import parse_config
from kvferry.tools.doctor.engine_metrics import of_config, of_metrics
from kvferry.tools.doctor.examine import _check_config
from kvferry.tools.doctor.finding import State

TIERS = {"tiers": "default"}
METRICS = """# HELP kvferry_first_snapshot_tokens First position
# TYPE kvferry_first_snapshot_tokens gauge
kvferry_first_snapshot_tokens{{engine="0",model_name="m"}} {first}
kvferry_snapshot_bytes{{engine="0",model_name="m"}} 3.9518208e+07
"""


def test_a_configuration_that_turns_them_off_is_noted():
    (found,) = of_config(parse_config({**TIERS, "first_snapshot_tokens": 0}))
    assert found.state is State.NOTE
    assert "shares only its beginning with others computes nearly all of it again" in found.found
    assert "leave first_snapshot_tokens out" in found.advice


def test_a_check_of_a_configuration_notes_disabled_first_snapshots():
    host = {"tiers": [{"type": "host", "capacity": "1MiB"}], "first_snapshot_tokens": 0}
    found = {one.subject: one.state for one in _check_config((parse_config(host),), None)}
    assert found["shared prefixes"] is State.NOTE


@pytest.mark.parametrize("more", [{}, {"first_snapshot_tokens": 4096}])
def test_a_configuration_that_keeps_them_is_not(more):
    assert of_config(parse_config({**TIERS, **more})) == []


def test_an_engine_that_keeps_them_says_where_and_what_each_costs():
    (found,) = of_metrics(METRICS.format(first="1088.0"))
    assert found.state is State.OK
    assert "snapshots of 37.69 MiB at 1,088, 2,176, 4,352 ... tokens of a prompt" in found.found


def test_an_engine_that_keeps_none_says_what_to_change_and_what_that_costs():
    (found,) = of_metrics(METRICS.format(first="0.0"))
    assert found.state is State.NOTE
    assert "first_snapshot_tokens is 0" in found.found
    assert "then keeps a snapshot of 37.69 MiB" in found.advice


@pytest.mark.parametrize("text", ["", "kvferry_tier_used_bytes 5\n", "kvferry_snapshot_bytes 5\n"])
def test_an_engine_without_recurrent_state_or_tiers_has_no_finding(text):
    assert of_metrics(text) == []


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


@pytest.mark.parametrize(
    ("strategy", "speed", "state"),
    [
        ("direct", 14e9, State.OK),
        ("direct", 1.8e8, State.NOTE),
        ("shared", 1.8e8, State.OK),
        ("direct+staged", 1.8e8, State.NOTE),
    ],
)
def test_slow_reads_are_noted_unless_memory_is_shared(strategy, speed, state):
    (found,) = of_metrics(
        "# TYPE kvferry_read_bytes_per_second gauge\n"
        f'kvferry_read_bytes_per_second{{engine="0",model_name="m",strategy="{strategy}"}} {speed}\n'
    )
    assert found.state is state
    assert f"{speed / 1e9:.2g} GB/s" in found.found
    assert found.found.endswith(f"strategy {strategy}")


def test_an_engine_that_has_read_from_no_peer_has_no_finding():
    assert of_metrics('kvferry_leases{engine="0"} 1\n') == []
