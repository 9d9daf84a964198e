"""What the doctor says of the speed at which an engine reads from its peers."""

import pytest

from kvferry.doctor import read_speed
from kvferry.doctor.finding import State


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
    (found,) = read_speed.of_metrics(
        "# TYPE kvferry_read_bytes_per_second gauge\n"
        f'kvferry_read_bytes_per_second{{engine="0",model_name="m",strategy="{strategy}"}} {speed}\n'
    )
    assert found.state is state
    assert f"{speed / 1e9:.2g} GB/s" in found.found
    assert found.found.endswith(f"strategy {strategy}")


def test_an_engine_that_has_read_from_no_peer_has_no_finding():
    assert read_speed.of_metrics('kvferry_leases{engine="0"} 1\n') == []
