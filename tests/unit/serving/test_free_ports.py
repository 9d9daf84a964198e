"""Ports that engines get, and use when they have started."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvferry.tools.serving import devices
from kvferry.tools.serving.devices import free_ports


def limit_to(monkeypatch: pytest.MonkeyPatch, folder: Path, ports: range) -> None:
    (folder / "range").write_text(f"{ports.stop}\t60999\n")
    monkeypatch.setattr(devices, "_EPHEMERAL_PORTS", folder / "range")
    monkeypatch.setattr(devices, "_LEAST_PORT", ports.start)


def test_ports_are_distinct_and_none_is_given_to_others_meanwhile():
    found = free_ports(20)
    first, last = map(int, devices._EPHEMERAL_PORTS.read_text().split())
    assert len({*found}) == 20
    assert not [port for port in found if first <= port <= last]


def test_a_port_in_use_is_passed_over(monkeypatch, tmp_path):
    with ExitStack() as stack:
        taken = stack.enter_context(socket.socket())
        taken.bind(("127.0.0.1", free_ports(1)[0]))
        port = taken.getsockname()[1]
        limit_to(monkeypatch, tmp_path, range(port, port + 4))
        for _ in range(10):
            assert port not in free_ports(2)


@pytest.mark.parametrize("ports", [range(0), range(20_000, 1_024)])
def test_without_other_ports_the_system_chooses(monkeypatch, tmp_path, ports):
    limit_to(monkeypatch, tmp_path, ports)
    assert all(free_ports(2))


def test_without_a_range_of_the_system_it_chooses(monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "_EPHEMERAL_PORTS", tmp_path / "none")
    assert all(free_ports(2))
