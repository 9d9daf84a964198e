"""What is said of prompts that share only their beginning, from settings and from metrics."""

import pytest

from kvferry.connector.config import parse_config
from kvferry.doctor import snapshots
from kvferry.doctor.examine import _check_config
from kvferry.doctor.finding import State

TIERS = {"tiers": "default"}
METRICS = """# HELP kvferry_first_snapshot_tokens First position
# TYPE kvferry_first_snapshot_tokens gauge
kvferry_first_snapshot_tokens{{engine="0",model_name="m"}} {first}
kvferry_snapshot_bytes{{engine="0",model_name="m"}} 3.9518208e+07
"""


def test_a_configuration_that_turns_them_off_is_noted():
    (found,) = snapshots.of_config(parse_config({**TIERS, "first_snapshot_tokens": 0}))
    assert found.state is State.NOTE
    assert "shares only its beginning with others computes nearly all of it again" in found.found
    assert "leave first_snapshot_tokens out" in found.advice


def test_a_check_of_a_configuration_notes_disabled_first_snapshots():
    host = {"tiers": [{"type": "host", "capacity": "1MiB"}], "first_snapshot_tokens": 0}
    found = {one.subject: one.state for one in _check_config((parse_config(host),), None)}
    assert found[snapshots.SUBJECT] is State.NOTE


@pytest.mark.parametrize("more", [{}, {"first_snapshot_tokens": 4096}])
def test_a_configuration_that_keeps_them_is_not(more):
    assert snapshots.of_config(parse_config({**TIERS, **more})) == []


def test_an_engine_that_keeps_them_says_where_and_what_each_costs():
    (found,) = snapshots.of_metrics(METRICS.format(first="1088.0"))
    assert found.state is State.OK
    assert "snapshots of 37.69 MiB at 1,088, 2,176, 4,352 ... tokens of a prompt" in found.found


def test_an_engine_that_keeps_none_says_what_to_change_and_what_that_costs():
    (found,) = snapshots.of_metrics(METRICS.format(first="0.0"))
    assert found.state is State.NOTE
    assert "first_snapshot_tokens is 0" in found.found
    assert "then keeps a snapshot of 37.69 MiB" in found.advice


@pytest.mark.parametrize("text", ["", "kvferry_tier_used_bytes 5\n", "kvferry_snapshot_bytes 5\n"])
def test_an_engine_without_recurrent_state_or_tiers_has_no_finding(text):
    assert snapshots.of_metrics(text) == []
