"""Messages are found on many sockets, whatever else is done with the sockets."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest
import zmq

from kvferry.transport.sockets import SocketPoller
from support.waiting import wait_for


class Peers:
    """Pairs of connected sockets. The poller has one end of each."""

    def __init__(self, number: int):
        self.context = zmq.Context()
        self.poller = SocketPoller[int]()
        self.ours, self.theirs = {}, {}
        for name in range(number):
            self.theirs[name] = there = self.context.socket(zmq.DEALER)
            port = there.bind_to_random_port("tcp://127.0.0.1")
            self.ours[name] = here = self.context.socket(zmq.DEALER)
            here.connect(f"tcp://127.0.0.1:{port}")
            self.poller.add(name, here)

    def close(self) -> None:
        for socket in [*self.ours.values(), *self.theirs.values()]:
            socket.close(linger=0)
        self.poller.close()
        self.context.term()


@pytest.fixture
def peers() -> Iterator[Peers]:
    found = Peers(8)
    yield found
    found.close()


def receive(peers: Peers, count: int) -> Counter[int]:
    """Receive so many messages, one per socket and call of `wait`."""
    found: Counter[int] = Counter()

    def total() -> int:
        for name in peers.poller.wait(5):
            peers.ours[name].recv(zmq.DONTWAIT)
            found[name] += 1
        return found.total()

    wait_for(lambda: count == 0 or total() >= count)
    return found


def test_sockets_without_messages_are_not_found(peers):
    assert peers.poller.wait(0.05) == []


def test_messages_that_arrive_together_are_all_found(peers):
    for _ in range(3):
        for socket in peers.theirs.values():
            socket.send(b"x")
    assert receive(peers, 24) == dict.fromkeys(range(8), 3)
    assert peers.poller.wait(0.05) == []


def test_a_message_is_found_though_sending_has_consumed_its_signal(peers):
    assert peers.poller.wait(0.1) == []  # every socket was asked once
    peers.theirs[0].send(b"x")
    # Asking consumes the signal, as sending may.
    wait_for(lambda: peers.ours[0].getsockopt(zmq.EVENTS) & zmq.POLLIN)
    peers.ours[0].send(b"y")
    peers.poller.note_sent(0)
    assert peers.poller.wait(0) == [0]


def test_no_message_is_lost_among_sends_at_random(peers):
    draw, sent, stop = random.Random(1), Counter(), threading.Event()

    def send() -> None:
        while not stop.is_set():
            name = draw.randrange(8)
            peers.theirs[name].send(b"x")
            sent[name] += 1
            time.sleep(0.0002)

    thread = threading.Thread(target=send)
    thread.start()
    found: Counter[int] = Counter()
    for number in range(1500):
        for name in peers.poller.wait(0.001):
            peers.ours[name].recv(zmq.DONTWAIT)
            found[name] += 1
        peers.ours[number % 8].send(b"y")
        peers.poller.note_sent(number % 8)
    stop.set()
    thread.join()
    found += receive(peers, sent.total() - found.total())
    assert found == sent


def test_a_wait_ends_when_another_thread_wakes_it(peers):
    for _ in range(2):
        found = []
        waits = threading.Thread(target=lambda found=found: found.append(peers.poller.wait(600)))
        waits.start()
        waits.join(0.1)
        assert waits.is_alive(), "one call ends one wait"
        peers.poller.wake()
        waits.join(60)
        assert found == [[]]


def test_a_removed_socket_is_not_found_and_its_name_may_be_used_again(peers):
    peers.theirs[0].send(b"x")
    peers.poller.remove(0)
    assert peers.poller.wait(0.1) == []
    peers.poller.add(0, peers.ours[0])
    assert receive(peers, 1) == {0: 1}
