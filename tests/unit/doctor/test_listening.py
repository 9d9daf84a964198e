import os
import socket
from pathlib import Path

import pytest

from kvferry.doctor import listening
from kvferry.doctor.finding import State
from kvferry.engines.vllm.config import parse_config

SECRET = b"0123456789abcdef0123456789abcdef"


@pytest.fixture
def secret(tmp_path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    return path


def states(found) -> list[State]:
    return [one.state for one in found]


def test_a_secret_that_only_its_owner_can_read(secret):
    assert listening.secret(None) == []
    assert states(listening.secret(str(secret))) == [State.OK]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_secret_that_others_can_read_is_bad(secret, mode):
    secret.chmod(mode)
    (found,) = listening.secret(str(secret))
    assert (found.state, found.advice) == (State.BAD, f"chmod 600 {secret}")


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_a_secret_of_somebody_else_is_bad(secret, monkeypatch):
    monkeypatch.setattr(listening.os, "geteuid", lambda: 4242)
    os.chown(secret, 4141, -1)
    (found,) = listening.secret(str(secret))
    assert "belongs to user 4141" in found.found


def test_a_secret_that_cannot_be_used(secret):
    secret.write_bytes(b"short")
    assert "holds 5 bytes" in listening.secret(str(secret))[0].found
    assert "No such file" in listening.secret("/nowhere/secret")[0].found


def test_without_curve_a_secret_is_of_no_use(secret, monkeypatch):
    monkeypatch.setattr(listening.zmq, "has", lambda what: False)
    assert [one.subject for one in listening.secret(str(secret)) if one.state is State.BAD] == ["CURVE"]


@pytest.mark.parametrize(
    ("extra", "state", "said"),
    [
        ({}, State.OK, "engines of this machine alone"),
        ({"host": "10.0.0.7"}, State.BAD, "is not loopback and no secret_file is set"),
        ({"host": "10.0.0.7", "allow_insecure": True}, State.NOTE, "without a secret"),
        ({"host": "10.0.0.7", "secret_file": "x"}, State.OK, "whoever has the secret"),
        ({"host": "0.0.0.0", "advertise_host": "kv1", "secret_file": "x"}, State.OK, "kv1: whoever"),
    ],
)
def test_who_may_read_an_engines_memory(extra, state, said):
    config = parse_config(extra)
    found = listening.who_may(config, config.host)
    assert found.state is state
    assert said in found.found


def test_a_port_that_is_free():
    assert states(listening.address("127.0.0.1", 0)) == [State.OK]


def test_a_port_in_use_is_bad():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (found,) = listening.address("127.0.0.1", port)
    assert (found.state, found.found) == (State.BAD, f"{port} on 127.0.0.1 is in use")
    assert states(listening.address("127.0.0.1", port)) == [State.OK]


def test_a_host_that_is_not_this_machine_is_bad():
    assert "is no address of this machine" in listening.address("192.0.2.77", 5600)[0].found
    assert states(listening.address("no.such.host.invalid", 5600)) == [State.BAD]


def test_the_address_of_a_node():
    assert listening.node_address({"VLLM_HOST_IP": "10.1.2.3"}) == "10.1.2.3"
    assert listening.node_address({})


def test_nothing_listens_where_no_kv_is_exchanged():
    assert states(listening.check(parse_config({"tiers": "default"}))) == [State.OK]
    assert len(listening.check(parse_config({}))) == 2
    assert listening.check(parse_config({"host": "node"}))[0].state is not State.NOTE
