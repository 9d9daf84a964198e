"""Strangers who connect and say nothing: a listener has few of them, and serves those whom it knows."""

import os
import socket
import threading
from contextlib import ExitStack, suppress

import pytest
import zmq

from kvferry.transport.listener import Listener
from kvferry.transport.security import secure_client
from support.keys import KEYS
from support.waiting import wait_for

HOST = "127.0.0.1"
MOST = 8


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def listener(stack):
    listener = Listener("channel", HOST, 0, KEYS, 1 << 20, MOST, handshake_seconds=1.0)
    stack.callback(listener.close)
    return listener


def peer(stack, listener) -> "zmq.Socket[bytes]":
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    secure_client(dealer, KEYS)
    dealer.connect(f"tcp://{HOST}:{listener.port}")
    stack.callback(context.term)
    stack.callback(dealer.close)
    return dealer


def strangers(stack, listener, number: int) -> None:
    for _ in range(number):
        one = stack.enter_context(socket.socket())
        one.settimeout(0.0)
        one.connect_ex((HOST, listener.port))


def heard(listener, dealer) -> bool:
    """Say something, and return whether it is what the listener hears."""
    dealer.send(b"hello")
    wait_for(lambda: listener.wait(0.05))
    return listener.receive()[1] == b"hello"


def look(listener, condition) -> None:
    """Have the listener look at its connections until the condition holds."""
    wait_for(lambda: condition() or (listener.wait(0.02) and None))


def test_too_many_strangers_stop_it_from_listening_and_a_known_peer_is_served_on(stack, listener):
    known = peer(stack, listener)
    assert heard(listener, known)
    strangers(stack, listener, MOST)
    look(listener, lambda: listener.connections.paused)
    with pytest.raises(TimeoutError):
        socket.create_connection((HOST, listener.port), timeout=0.5).close()
    assert heard(listener, known)


def test_a_listener_accepts_again_once_strangers_have_had_their_time(stack, listener):
    strangers(stack, listener, MOST)
    look(listener, lambda: listener.connections.paused)
    look(listener, lambda: not listener.connections.paused)
    assert heard(listener, peer(stack, listener))


def test_strangers_who_leave_are_not_counted(stack, listener):
    for _ in range(5 * MOST):
        socket.create_connection((HOST, listener.port)).close()
        listener.wait(0.02)
    assert heard(listener, peer(stack, listener))
    look(listener, lambda: listener.connections.open == 1)
    assert not listener.connections.paused


def test_a_frame_that_is_longer_than_the_limit_ends_the_connection(stack, listener):
    dealer = peer(stack, listener)
    assert heard(listener, dealer)
    dealer.send(bytes((1 << 20) + 1))
    look(listener, lambda: listener.connections.open == 0)


def test_a_listener_that_nobody_looks_at_accepts_a_thousand_and_closes(stack):
    listener = Listener("channel", HOST, 0, KEYS, 1 << 20, 1 << 20)
    number = 0
    with suppress(TimeoutError):
        while number < 5000:
            socket.create_connection((HOST, listener.port), timeout=2.0).close()
            number += 1
    # Each connection begins and ends, which are two events; a backlog waits for the kernel.
    assert number < 1000, "ZeroMQ has stopped accepting"
    closing = threading.Thread(target=listener.close, daemon=True)
    closing.start()
    closing.join(20.0)
    assert not closing.is_alive()


def test_a_listener_that_is_interrupted_waits_no_more(listener):
    waits = threading.Thread(target=listener.wait, args=(30.0,), daemon=True)
    waits.start()
    listener.interrupt()
    waits.join(10.0)
    assert not waits.is_alive()
    assert not listener.wait(30.0)


def test_a_listener_that_is_closed_can_be_interrupted(stack):
    listener = Listener("channel", HOST, 0, KEYS, 1 << 20, MOST)
    listener.close()
    other = os.eventfd(0, os.EFD_NONBLOCK)  # has the number of a descriptor that was closed
    stack.callback(os.close, other)
    listener.interrupt()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(other)
