import socket
from pathlib import Path

import pytest

from kvferry.connector.config import parse_config
from kvferry.tools.doctor import listening
from kvferry.tools.doctor.finding import State
from kvferry.transport.security import read_keys

SECRET = b"0123456789abcdef0123456789abcdef"


@pytest.fixture
def secret(tmp_path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    return path


def states(found) -> list[State]:
    return [one.state for one in found]


def test_a_secret_that_others_cannot_read_is_named_with_its_fingerprint(secret):
    found = listening.key(str(secret))
    assert (found.state, "(mode 600), fingerprint" in found.found) == (State.OK, True)


def test_a_secret_that_everybody_can_read_is_bad(secret):
    secret.chmod(0o604)
    found = listening.key(str(secret))
    assert (found.state, f"chmod 600 {secret}" in f"{found.found} {found.advice}") == (State.BAD, True)


def test_a_secret_that_cannot_be_used(secret):
    secret.write_bytes(b"short")
    assert "holds 5 bytes" in listening.key(str(secret)).found
    assert "No such file" in listening.key("/nowhere/secret").found


def test_the_machines_key_is_looked_at_and_not_made(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    found = listening.key(None)
    assert (found.state, "created by the first engine" in found.found) == (State.OK, True)
    assert list(tmp_path.iterdir()) == []
    keys = read_keys(None)
    assert keys.fingerprint in listening.key(None).found


@pytest.mark.parametrize(
    ("extra", "state", "said"),
    [
        ({}, State.OK, "only engines on this machine"),
        ({"host": "10.0.0.7"}, State.NOTE, "no secret_file: only this user's engines on this machine"),
        ({"host": "10.0.0.7", "secret_file": "x"}, State.OK, "all engines with the key"),
        (
            {"host": "10.0.0.7", "secret_file": "x", "peers": ["10.0.0.0/8"]},
            State.OK,
            "at 10.0.0.0/8 (peers)",
        ),
        ({"host": "0.0.0.0", "advertise_host": "kv1", "secret_file": "x"}, State.OK, "kv1: all engines"),
    ],
)
def test_the_finding_says_which_machines_may_read_memory(extra, state, said):
    config = parse_config(extra)
    found = listening.access(config, config.host)
    assert found.state is state
    assert said in found.found


def test_a_name_to_advertise_is_noted_since_peers_must_list_it():
    (found,) = listening.advertised("kv1.example.org")
    assert (found.state, "--peers kv1.example.org" in found.advice) == (State.NOTE, True)
    assert [listening.advertised(told) for told in (None, "localhost", "10.0.0.7", "::1")] == [[]] * 4


def of_address(host: str, port: int = 0, **more):
    """Findings on the address of an engine."""
    found = listening.check(parse_config({"host": host, "port": port, **more}))
    return [one for one in found if one.subject in ("host", "port")]


def test_a_port_that_is_free():
    assert states(of_address("127.0.0.1")) == [State.OK, State.OK]


def test_a_port_in_use_is_bad():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        _, found = of_address("127.0.0.1", port)
    assert (found.state, found.found) == (State.BAD, f"port {port} on 127.0.0.1 is in use")
    assert states(of_address("127.0.0.1", port)) == [State.OK, State.OK]


@pytest.mark.parametrize(
    ("host", "said"),
    [("192.0.2.77", "is not an address of this machine"), ("no.such.host.invalid", "cannot be resolved")],
)
def test_a_host_that_is_not_this_machine_is_one_bad_finding(host, said):
    (found,) = of_address(host)
    assert (found.state, said in found.found) == (State.BAD, True)


def test_an_engine_may_listen_on_every_address():
    assert states(of_address("*", advertise_host="10.0.0.7", secret_file="x")) == [State.OK, State.OK]


def test_the_address_of_a_node():
    assert listening.node_address({"VLLM_HOST_IP": "10.1.2.3"}) == "10.1.2.3"
    assert listening.node_address({})


def test_an_engine_that_exchanges_no_kv_listens_on_no_port():
    assert states(listening.check(parse_config({"tiers": "default"}))) == [State.OK]
    assert [one.subject for one in listening.check(parse_config({}))] == ["key", "host", "port"]
    assert listening.check(parse_config({"host": "node"}))[0].state is not State.NOTE
