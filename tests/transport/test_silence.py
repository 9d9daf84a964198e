"""A peer whose machine no longer answers: its own loads wait, and no other peer's."""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

import psutil

from kvferry.tools.doctor.ports import listening_ports
from transport import large
from transport.pair import Producer


def silence(producer: Producer) -> None:
    """Stop a producer that this process reads from, so that nothing answers a new connection to it.

    The kernel drops new connections to a port whose queue of connections to accept is full. A connection
    stays in the queue after its client has closed it.
    """
    ports = {port.number for port in listening_ports(producer.process.pid)}
    producer.signal(signal.SIGSTOP)
    there = [one.raddr for one in psutil.Process(os.getpid()).net_connections("tcp") if one.raddr]
    reached = {address for address in there if address.port in ports}
    assert reached, "no connection to the producer was found"
    for address in reached:
        assert any(refused(address) for _ in range(2 * socket.SOMAXCONN)), "its queue does not fill"


def refused(address: Any) -> bool:
    """Connect and close. Return whether the connection was not made in time: the queue is full."""
    with socket.socket() as client:
        client.settimeout(0.3)
        try:
            client.connect((address.ip, address.port))
        except TimeoutError:
            return True
        return False


def test_a_peer_that_answers_no_connection_delays_no_other_peer(over_tcp, world):
    reader = world.reader(large.RANK)
    lost = world.producer(large.SPEC, large.FAMILIES, seed=50)
    other = world.shared_producer(large.SPEC, large.FAMILIES, seed=60)
    for name, producer in (("lost", lost), ("other", other)):
        reader.thread.connect(name, producer.cards)
        reader.submit(f"{name}'s", name, large.span(1), large.FORWARD, large.FORWARD)
        assert reader.result(f"{name}'s").failure is None
    silence(lost)
    reader.thread.disconnect("lost")
    reader.thread.connect("lost", lost.cards)
    reader.submit("waits", "lost", large.span(1), large.FORWARD, large.FORWARD)
    reader.submit("served", "other", large.span(1), large.FORWARD, large.FORWARD)
    assert reader.result("served").failure is None
    assert reader.poll("waits") is None, "the lane has waited for the lost peer"
    lost.signal(signal.SIGKILL)
    assert reader.result("waits").peer_lost
