"""Descriptions of engines, asked over real sockets from control servers without an engine."""

import socket
import threading
from contextlib import contextmanager

import pytest
import zmq

from kvferry.keys import prompt_digest
from kvferry.tools.doctor import identity
from kvferry.tools.doctor.identity import IdentifyError, identify, release_ticket
from kvferry.transport.control_server import ControlServer, LeaseClaims
from kvferry.transport.lease import LeaseWord
from kvferry.transport.messages import PROTOCOL, PeerInfo
from kvferry.transport.redeem import Grant, PromptContent
from support.keys import KEYS, OTHER_KEYS
from support.waiting import wait_for
from transport.cards import cards, facts, ticket

HOST = "127.0.0.1"


@contextmanager
def server(keys=KEYS):
    one = ControlServer(HOST, 0, PeerInfo(facts(weights="theirs"), cards()), keys)
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


def test_an_engine_describes_itself_to_a_client_without_facts():
    with server() as one:
        met = identify((HOST, one.port), KEYS, 60.0)
    assert (met.facts, met.ranks) == (facts(weights="theirs"), cards())
    assert met.round_trip_seconds > 0


def test_an_engine_asks_for_a_key_if_none_is_given():
    with server() as one, pytest.raises(IdentifyError, match="asks for a key") as refused:
        identify((HOST, one.port), None, 60.0)
    assert "--secret-file" in refused.value.advice


def test_another_key_gets_no_answer():
    with server(OTHER_KEYS) as one, pytest.raises(IdentifyError, match="it has another key") as refused:
        identify((HOST, one.port), KEYS, 1.0)
    assert "--secret-file" in refused.value.advice
    assert refused.value.advice.endswith("or add this machine to the engine's peers setting")


def test_a_channel_without_encryption_is_no_engines():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as plain:
        plain.linger = 0
        port = plain.bind_to_random_port(f"tcp://{HOST}")
        with pytest.raises(IdentifyError, match=r"without encryption \(NULL\)"):
            identify((HOST, port), KEYS, 60.0)


def test_a_refused_connection_is_reported():
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        with pytest.raises(IdentifyError, match="cannot be reached: Connection refused"):
            identify((HOST, sock.getsockname()[1]), KEYS, 60.0)


def test_another_server_is_not_taken_for_a_control_channel():
    with (
        listener(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port,
        pytest.raises(IdentifyError, match="not an engine's control channel"),
    ):
        identify((HOST, port), KEYS, 60.0)


def test_a_silent_server_is_given_up():
    with listener(None) as port, pytest.raises(IdentifyError, match=r"no answer within 0\.3 s"):
        identify((HOST, port), KEYS, 0.3)


def test_another_protocol_version_is_refused(monkeypatch):
    monkeypatch.setattr(identity, "PROTOCOL", 99)
    with server() as one, pytest.raises(IdentifyError, match=f"protocol {PROTOCOL} there, 99 here"):
        identify((HOST, one.port), KEYS, 60.0)


def test_a_lease_is_given_back():
    with server() as one:
        content = PromptContent(prompt_digest([5, 6, 7]))
        one.tickets.publish(ticket("a"), "cmpl-1", 3, content, Grant.of(LeaseWord(1, 2, 1), 3, [[1]]))
        release_ticket((HOST, one.port), KEYS, ticket("a"), [5, 6, 7])
        wait_for(lambda: len(one.events) >= 2)
        assert list(one.events) == [LeaseClaims(["cmpl-1"]), LeaseClaims(["cmpl-1"], released=True)]
