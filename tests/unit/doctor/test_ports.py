"""Ports of engines, read from /proc, for processes that listen on them."""

import os
import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest

from kvferry.tools.doctor import ports
from kvferry.tools.doctor.finding import State

# One worker has the process.
pytestmark = pytest.mark.xdist_group("doctor ports")

PROGRAM = """
import socket, sys
held = [socket.create_server((host, 0)) for host in ("127.0.0.1", "0.0.0.0")]
held.append(socket.create_server(("::1", 0), family=socket.AF_INET6))
print(*(one.getsockname()[1] for one in held), flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def process():
    """A process that listens on a port of each address. Its command line names vllm."""
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
    assert list(ports.engine_of("127.0.0.1", process.numbers[0])) == [process.pid]
    with socket.create_server(("127.0.0.1", 0)) as unused:
        number = unused.getsockname()[1]
        assert os.getpid() in ports.engine_of("127.0.0.1", number)
    assert ports.engine_of("127.0.0.1", number) == {}


def namespaces(names: dict[int, str]):
    """Return a function that gives processes a network namespace by id; others have their own."""
    return lambda pid: names.get(pid) or ports.network_namespace(pid)


@contextmanager
def listening_process(address, number):
    """Yield the id of a fork that alone listens on a port."""
    read, write = os.pipe()
    with socket.create_server((address, number)):
        if (child := os.fork()) == 0:
            os.read(read, 1)
            os._exit(0)
    try:
        yield child
    finally:
        os.write(write, b"x")
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)


def test_an_engine_is_found_by_its_address_if_another_has_the_same_port(process):
    number = process.numbers[0]
    with listening_process("127.0.0.2", number) as other:
        assert list(ports.engine_of("127.0.0.1", number)) == [process.pid]
        assert list(ports.engine_of("127.0.0.2", number)) == [other]


def test_an_engine_in_another_container_is_not_taken_for_one_with_an_equal_port(process):
    number = process.numbers[0]
    with listening_process("127.0.0.2", number) as other:
        one_apart = namespaces({process.pid: "container"})
        assert list(ports.engine_of("127.0.0.2", number, one_apart)) == [other]
        both_apart = namespaces({process.pid: "container", other: "other container"})
        assert ports.engine_of("127.0.0.2", number, both_apart) == {}


def test_an_engine_in_a_container_is_found_by_a_port_that_is_forwarded_to_it(process):
    found = ports.engine_of("127.0.0.5", process.numbers[0], namespaces({process.pid: "container"}))
    assert list(found) == [process.pid]


def test_a_process_that_is_gone_has_none():
    assert ports.listening_ports(1 << 30) == []


def test_a_finding_says_which_clients_may_use_a_port(process):
    one, other, third = process.numbers
    processes = {process.pid: "VLLM::Worker_TP0"}
    found = ports.findings(processes, {one: "control channel"})
    said = {finding.subject: (finding.state, finding.found, finding.advice) for finding in found}
    assert said[f"port 127.0.0.1:{one}"][:2] == (
        State.OK,
        f"control channel (process {process.pid}, VLLM::Worker); only clients with the key are let in",
    )
    state, text, advice = said[f"port 0.0.0.0:{other}"]
    assert state is State.NOTE
    assert "open to everyone who can reach it, who can end the process with random bytes" in text
    assert "docs/network.md" in advice
    state, text, _ = said[f"port [::1]:{third}"]
    assert state is State.OK
    assert "open to processes of this machine" in text


def test_ports_of_ranks_that_differ_only_by_number_are_one_finding(monkeypatch):
    listening = {7: [20002, 20001], 8: [20003]}
    monkeypatch.setattr(
        ports,
        "listening_ports",
        lambda pid: [ports.Port(pid, "10.0.0.1", number) for number in listening[pid]],
    )
    (found,) = ports.findings({7: "VLLM::Worker_TP0", 8: "VLLM::Worker_TP1"}, {})
    assert found.subject == "3 ports of 10.0.0.1"
    assert found.found.startswith(
        "20001, 20002, 20003: UCX, or vLLM's own (processes 7, 8, VLLM::Worker); open"
    )


def test_roles_are_told_from_command_lines(process):
    child = {process.pid: f"{sys.executable} -P -m kvferry.transport.metadata_sandbox 5 6 nixl_cu12"}
    assert all("child process that validates" in finding.found for finding in ports.findings(child, {}))
    api = {process.pid: "python /bin/vllm serve model"}
    assert all("API" in finding.found for finding in ports.findings(api, {}))
