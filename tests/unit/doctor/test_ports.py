"""What an engine listens on, read from /proc, for processes that really listen."""

import os
import socket
import subprocess
import sys

import pytest

from kvferry.doctor import ports
from kvferry.doctor.finding import State

PROGRAM = """
import socket, sys
held = [socket.create_server((host, 0)) for host in ("127.0.0.1", "0.0.0.0")]
held.append(socket.create_server(("::1", 0), family=socket.AF_INET6))
print(*(one.getsockname()[1] for one in held), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def process():
    """Listens on a port of each address; its command line names vllm."""
    started = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "vllm"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    started.numbers = [int(number) for number in started.stdout.readline().split()]
    yield started
    started.communicate()


def test_every_port_of_a_process_is_found_with_its_address(process):
    addresses = ["127.0.0.1", "0.0.0.0", "::1"]
    expected = {ports.Port(process.pid, *pair) for pair in zip(addresses, process.numbers, strict=True)}
    assert set(ports.listening_ports(process.pid)) == expected
    assert sorted(port.is_loopback for port in expected) == [False, True, True]


def test_an_engine_is_its_topmost_process_and_those_below(process):
    assert list(ports.engine_of(process.numbers[0])) == [process.pid]
    with socket.create_server(("127.0.0.1", 0)) as unused:
        number = unused.getsockname()[1]
        assert os.getpid() in ports.engine_of(number)
    assert ports.engine_of(number) == {}


def test_a_process_that_is_gone_has_none():
    assert ports.listening_ports(1 << 30) == []


def test_who_may_use_a_port_is_said(process):
    one, other, third = process.numbers
    processes = {process.pid: "VLLM::Worker_TP0"}
    found = ports.findings(processes, {one: "control channel"})
    said = {finding.subject: (finding.state, finding.found, finding.advice) for finding in found}
    assert said[f"port 127.0.0.1:{one}"][:2] == (
        State.OK,
        f"control channel (process {process.pid}, VLLM::Worker_TP0); only clients with the key are let in",
    )
    state, text, advice = said[f"port 0.0.0.0:{other}"]
    assert state is State.NOTE
    assert "open to everyone who can reach it, who can end the process with random bytes" in text
    assert "docs/network.md" in advice
    state, text, _ = said[f"port [::1]:{third}"]
    assert state is State.OK
    assert "open to processes of this machine" in text


def test_roles_are_told_from_command_lines(process):
    child = {process.pid: f"{sys.executable} -P -m kvferry.transport.metadata_sandbox 5 6 nixl_cu12"}
    assert all("child process that validates" in finding.found for finding in ports.findings(child, {}))
    api = {process.pid: "python /bin/vllm serve model"}
    assert all("API" in finding.found for finding in ports.findings(api, {}))
