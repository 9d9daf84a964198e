"""When a lane's connection to a peer is made anew, with a clock of its own."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from kvferry.common.errors import TransferError
from kvferry.transport.lane_connections import LaneConnections
from support.clock import Clock

UNREACHABLE = TransferError("unreachable")


class Peer:
    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


class World:
    """What connections are made of: each attempt raises `fault`, if there is one."""

    def __init__(self) -> None:
        self.clock, self.attempts, self.in_use = Clock(), 0, list[Peer]()
        self.fault: Exception | None = None
        self.verdict = ""
        self.links = LaneConnections(self.make, self.validate, lambda: self.in_use, self.clock)

    def validate(self, cards) -> Future[str]:
        self.asked = Future()
        if self.verdict is not None:
            self.asked.set_result(self.verdict)
        return self.asked

    def make(self, cards) -> Peer:
        self.attempts += 1
        if self.fault is not None:
            raise self.fault
        return Peer()


@pytest.fixture
def world() -> World:
    return World()


def test_a_peer_that_cannot_be_connected_is_tried_again_after_growing_pauses(world):
    world.fault = UNREACHABLE
    world.links.connect("P", ())
    tried = []
    for second in range(300):
        before = world.attempts
        assert world.links.get("P") == "peer P cannot be read from: unreachable"
        if world.attempts > before:
            tried.append(second)
        world.clock.now += 1
    assert tried == [0, 1, 3, 7, 15, 31, 63, 123, 183, 243]
    world.fault = None
    world.clock.now += 60
    assert isinstance(world.links.get("P"), Peer)


def test_a_success_ends_the_pauses(world):
    world.links.connect("P", ())
    for _ in range(5):
        peer = world.links.get("P")
        world.links.mark_served(peer)
        world.links.mark_failed(peer, "the transport failed")
        assert isinstance(world.links.get("P"), Peer), "the first failure after a success waits for nothing"


def test_a_connection_that_is_up_is_kept_whoever_asks_for_it_again(world):
    world.links.connect("P", ())
    first = world.links.get("P")
    world.links.connect("P", ())
    assert world.links.get("P") is world.links.get("P") is first
    assert (world.attempts, first.closed) == (1, False)


def test_reads_that_fail_one_after_the_other_make_pauses_grow(world):
    world.links.connect("P", ())
    world.links.mark_failed(world.links.get("P"), "the transport failed")
    world.links.mark_failed(world.links.get("P"), "the transport failed")
    for _ in range(10):
        assert world.links.get("P") == "the transport failed"
        world.clock.now += 0.0999
    world.clock.now += 0.001
    assert isinstance(world.links.get("P"), Peer)


def test_a_success_with_one_peer_says_nothing_of_another(world):
    for name in "PQ":
        world.links.connect(name, ())
    world.links.mark_failed(world.links.get("P"), "the transport failed")
    broken = world.links.get("P")
    world.links.mark_served(world.links.get("Q"))
    world.links.mark_failed(broken, "the transport failed")
    assert world.links.get("P") == "the transport failed", "its second failure in a row"


def test_a_peer_that_is_not_connected_can_be_disconnected(world, caplog):
    world.links.disconnect("nobody")
    world.fault = UNREACHABLE
    world.links.connect("P", ())
    assert list(world.links) == []
    world.links.disconnect("P")
    world.links.close_unused()
    assert list(world.links) == []
    assert world.links.get("P") == "peer P is not connected"
    assert not caplog.records


def test_no_second_connection_is_made_while_a_read_uses_the_first(world):
    world.links.connect("P", ())
    first = world.links.get("P")
    world.in_use = [first]
    world.links.mark_failed(first, "the transport failed")
    assert world.links.get("P") == "peer P cannot be read from: reads of its last connection are in flight"
    assert not first.closed
    world.in_use = []
    second = world.links.get("P")
    assert isinstance(second, Peer)
    assert (first.closed, second.closed) == (True, False)


def test_a_disconnected_peer_is_closed_when_nothing_uses_it(world):
    world.links.connect("P", ())
    peer = world.links.get("P")
    world.in_use = [peer]
    world.links.disconnect("P")
    world.links.close_unused()
    assert world.links.get("P") == "peer P is not connected"
    assert (peer.closed, list(world.links)) == (False, [peer])
    world.in_use = []
    world.links.close_unused()
    assert (peer.closed, list(world.links)) == (True, [])


def test_a_connection_that_cannot_be_closed_keeps_no_other_open(world, caplog):
    def failing():
        raise RuntimeError("nobody expects this")

    for name in "PQ":
        world.links.connect(name, ())
    first, second = (world.links.get(name) for name in "PQ")
    first.close = failing
    for name in "PQ":
        world.links.disconnect(name)
    world.links.close_unused()
    assert (second.closed, list(world.links)) == (True, [])
    assert "closing the connection to P" in caplog.text


def test_an_unexpected_error_costs_that_peer(world, caplog):
    world.fault = RuntimeError("nobody expects this")
    world.links.connect("P", ())
    assert world.links.get("P") == "peer P cannot be read from: nobody expects this"
    assert "please report it" in caplog.text


def test_a_peer_is_not_connected_before_its_metadata_has_passed(world):
    world.verdict = None
    world.links.connect("P", ())
    assert world.links.get("P") is None
    assert (world.links.process_verdicts(), world.attempts) == (False, 0)
    world.asked.set_result("")
    assert world.links.process_verdicts()
    assert (isinstance(world.links.get("P"), Peer), world.attempts) == (True, 1)
    assert not world.links.process_verdicts()


def test_a_refused_peer_is_asked_about_again_after_growing_pauses(world):
    world.verdict = "signal 11"
    world.links.connect("P", ())
    for _ in range(3):
        assert world.links.get("P") == "peer P cannot be read from: signal 11"
    assert world.attempts == 0
    world.clock.now += 1
    world.verdict = ""
    assert isinstance(world.links.get("P"), Peer)


def test_a_verdict_on_a_peer_that_was_disconnected_is_ignored(world):
    world.verdict = None
    world.links.connect("P", ())
    world.links.disconnect("P")
    world.asked.set_result("")
    assert not world.links.process_verdicts()
    assert (world.attempts, world.links.get("P")) == (0, "peer P is not connected")


def test_a_poll_connects_the_peer_whose_metadata_has_passed_and_no_other(world):
    for name in "PQ":
        world.links.connect(name, ())
    world.verdict = None
    world.links.connect("R", ())
    assert world.links.get("R") is None
    assert not world.links.process_verdicts()
    world.asked.set_result("")
    assert world.links.process_verdicts()
    assert isinstance(world.links.get("R"), Peer)
    assert world.attempts == 3


@pytest.mark.parametrize("again", [True, False])
def test_the_verdict_on_a_peer_that_was_disconnected_connects_nothing(world, again):
    world.verdict = None
    world.links.connect("P", ())
    first = world.asked
    world.links.disconnect("P")
    if again:
        world.links.connect("P", ())
    first.set_result("")
    assert not world.links.process_verdicts()
    assert world.attempts == 0
