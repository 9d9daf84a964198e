"""Over real sockets; the engines are control servers without an engine."""

import socket
import threading
import time
from contextlib import contextmanager

import pytest

from kvferry.doctor import meeting
from kvferry.doctor.meeting import CannotMeet, meet, release
from kvferry.transport import security
from kvferry.transport.control_server import Card, ControlServer
from kvferry.transport.messages import PROTOCOL, Release
from transport.cards import cards, facts

HOST = "127.0.0.1"


@pytest.fixture
def keys(tmp_path) -> security.Keys:
    path = tmp_path / "secret"
    path.write_bytes(b"0123456789abcdef")
    found = security.read_keys(str(path))
    assert found is not None
    return found


@contextmanager
def server(keys=None):
    one = ControlServer(HOST, 0, Card(facts(weights="theirs"), cards()), keys)
    try:
        yield one
    finally:
        one.close()


@contextmanager
def listener(answer: bytes | None):
    """Somebody who says `answer` to whoever connects; nothing, for None."""
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        sock.listen()
        held = []

        def run():
            try:
                while True:
                    connection, _ = sock.accept()
                    held.append(connection)
                    if answer is not None:
                        connection.recv(100)
                        connection.sendall(answer)
                        connection.close()
            except OSError:
                return

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield sock.getsockname()[1]
        finally:
            sock.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in held:
                connection.close()


def test_an_engine_says_who_it_is_to_whoever_states_nothing():
    with server() as one:
        met = meet((HOST, one.port), None, 5.0)
    assert (met.facts, met.ranks, met.encrypted) == (facts(weights="theirs"), cards(), False)
    assert 0 < met.round_trip_seconds < 5


def test_an_engine_with_a_secret_is_met_with_that_secret(keys):
    with server(keys) as one:
        met = meet((HOST, one.port), keys, 5.0)
    assert met.encrypted
    assert met.ranks == cards()


def test_an_engine_without_a_secret_is_met_by_who_has_one(keys):
    with server() as one:
        assert not meet((HOST, one.port), keys, 5.0).encrypted


def test_without_the_secret_it_is_said_that_there_is_one(keys):
    with server(keys) as one, pytest.raises(CannotMeet, match="asks for a secret") as refused:
        meet((HOST, one.port), None, 5.0)
    assert "--secret-file" in refused.value.advice


def test_another_secret_gets_no_answer(keys, tmp_path):
    (tmp_path / "other").write_bytes(b"another secret, as long")
    other = security.read_keys(str(tmp_path / "other"))
    with server(keys) as one, pytest.raises(CannotMeet, match="does not answer") as refused:
        meet((HOST, one.port), other, 1.0)
    assert "secret" in refused.value.advice


def test_nobody_listens():
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        with pytest.raises(CannotMeet, match="cannot be reached: Connection refused"):
            meet((HOST, sock.getsockname()[1]), None, 5.0)


def test_what_is_no_control_channel_is_told_apart():
    with (
        listener(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port,
        pytest.raises(CannotMeet, match="no control channel"),
    ):
        meet((HOST, port), None, 5.0)


def test_who_says_nothing_is_given_up():
    began = time.monotonic()
    with listener(None) as port, pytest.raises(CannotMeet, match=r"no answer within 0\.3 s"):
        meet((HOST, port), None, 0.3)
    assert time.monotonic() - began < 5


def test_another_protocol_is_refused_in_words(monkeypatch):
    monkeypatch.setattr(meeting, "PROTOCOL", 99)
    with server() as one, pytest.raises(CannotMeet, match=f"protocol {PROTOCOL} there, 99 here"):
        meet((HOST, one.port), None, 5.0)


def test_a_lease_is_given_back(keys):
    for secret in (None, keys):
        with server(secret) as one:
            release((HOST, one.port), secret, "cmpl-1")
            until = time.monotonic() + 5
            while not one.events:
                assert time.monotonic() < until
                time.sleep(0.005)
            assert list(one.events) == [Release(["cmpl-1"])]
