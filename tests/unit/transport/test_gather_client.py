"""The reader's end of the gather channel, against a rank that says what it likes."""

from contextlib import ExitStack

import numpy as np
import pytest
import zmq

from kvferry.planning.cell_copy import PoolCopies
from kvferry.planning.strided_copy import StridedCopy
from kvferry.transport.gather_client import (
    MAX_REPLY_BYTES,
    AnnounceRoutes,
    Done,
    Gather,
    GatherClient,
    Gathered,
    GatherRoute,
    NotGathered,
    decode_request,
)
from kvferry.transport.lease import LeaseWord
from kvferry.transport.messages import PROTOCOL, encode
from kvferry.transport.security import secure_server
from support.keys import KEYS

ROUTES = [GatherRoute(4096, 8, 64, (PoolCopies((0, 8), (StridedCopy(0, 0, 8),)),))]
TICKET = LeaseWord(3, 9, 1)
BLOCKS = np.array([5, 2], np.int64)


class Rank:
    """The other end: hears everything, answers what it is told to."""

    def __init__(self, socket) -> None:
        self._socket = socket
        self.sender = b""

    def hear(self, seconds: float = 10.0):
        if not self._socket.poll(seconds * 1000):
            return None
        self.sender, message = self._socket.recv_multipart()
        return decode_request(message)

    def say(self, reply) -> None:
        self._socket.send_multipart([self.sender, reply if isinstance(reply, bytes) else encode(reply)])


@pytest.fixture
def ends():
    with ExitStack() as stack:
        context = zmq.Context()
        stack.callback(context.destroy, linger=0)
        router = context.socket(zmq.ROUTER)
        secure_server(router, KEYS)
        client = GatherClient(
            context, "127.0.0.1", router.bind_to_random_port("tcp://127.0.0.1"), ROUTES, KEYS
        )
        rank = Rank(router)
        assert rank.hear() == AnnounceRoutes(PROTOCOL, ROUTES)
        yield client, rank
        client.close()


def answer(client, segment):
    """Wait until there is one."""
    if (found := client.answer(segment)) is not None:
        return found
    client.socket.poll(10_000)
    return client.answer(segment)


def test_a_request_is_heard_and_answered_once(ends):
    client, rank = ends
    segment = client.ask(4, TICKET, BLOCKS, BLOCKS + 1)
    assert rank.hear() == Gather(
        segment, 4, 3, 9, BLOCKS.astype(np.int32).tobytes(), (BLOCKS + 1).astype(np.int32).tobytes()
    )
    assert client.answer(segment) is None
    rank.say(Gathered(segment, 1, 2, 3))
    assert answer(client, segment) == Gathered(segment, 1, 2, 3)
    assert client.answer(segment) is None
    assert not client._wanted, "nothing is kept of it"
    client.done(segment)
    assert rank.hear() == Done(segment)


def test_answers_come_in_any_order_and_garbage_between_them(ends):
    client, rank = ends
    first, second = (client.ask(0, TICKET, BLOCKS, BLOCKS) for _ in range(2))
    rank.hear()
    for reply in (
        b"",
        b"\xc1\xc1",
        Gathered(second, 2, 2, 2),
        Gathered(999, 0, 0, 0),
        NotGathered(first, "no"),
    ):
        rank.say(reply)
    while (found := answer(client, first)) is None:
        pass
    assert found == NotGathered(first, "no")
    assert client.answer(second) == Gathered(second, 2, 2, 2)
    assert not client._answers


def test_an_answer_that_is_too_long_ends_the_connection(ends):
    client, rank = ends
    segment = client.ask(0, TICKET, BLOCKS, BLOCKS)
    rank.hear()
    poller = zmq.Poller()
    poller.register(client.socket, zmq.POLLIN)
    poller.register(ended := client.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED), zmq.POLLIN)
    rank.say(bytes(MAX_REPLY_BYTES + 1))
    rank.say(Gathered(segment, 1, 2, 3))
    assert [socket for socket, _ in poller.poll(60_000)] == [ended]
    assert client.answer(segment) is None, "neither comes"


def test_an_answer_that_is_no_longer_wanted_is_forgotten(ends):
    client, rank = ends
    segment, other = (client.ask(0, TICKET, BLOCKS, BLOCKS) for _ in range(2))
    client.done(segment)
    for _ in range(3):
        rank.hear()
    rank.say(Gathered(segment, 0, 0, 0))
    rank.say(Gathered(other, 0, 0, 0))
    while answer(client, other) is None:
        pass
    assert client.answer(segment) is None
    assert not client._answers
    assert not client._wanted


def test_an_unknown_reader_announces_its_routes_again_once(ends):
    client, rank = ends
    chunks = [client.ask(0, TICKET, BLOCKS, BLOCKS) for _ in range(3)]
    for segment in chunks:
        assert rank.hear().segment == segment
        rank.say(NotGathered(segment, "who are you", unknown=True))
    for segment in chunks:
        while (found := answer(client, segment)) is None:
            pass
        assert found.reason == "who are you"
    assert rank.hear() == AnnounceRoutes(PROTOCOL, ROUTES)
    segment = client.ask(0, TICKET, BLOCKS, BLOCKS)
    assert rank.hear().segment == segment, "of three such answers to what was asked before, one counts"
    rank.say(NotGathered(segment, "who are you", unknown=True))
    answer(client, segment)
    assert rank.hear() == AnnounceRoutes(PROTOCOL, ROUTES)


def test_any_answer_ends_silence(ends):
    client, rank = ends
    segment = client.ask(0, TICKET, BLOCKS, BLOCKS)
    rank.hear()
    client.silent_until = 1e9
    client.done(segment)
    rank.say(NotGathered(segment, "late"))
    client.socket.poll(10_000)
    assert client.is_silent(1e8) is False
    assert client.silent_until == 0


def test_silence_ends_by_itself(ends):
    client, _ = ends
    client.silent_until = 50.0
    assert client.is_silent(49.0)
    assert not client.is_silent(50.0)


def test_a_rank_that_takes_no_more_requests_refuses_at_once(monkeypatch):
    monkeypatch.setattr("kvferry.transport.gather_client._QUEUED", 1)
    context = zmq.Context()
    client = GatherClient(context, "127.0.0.1", 1, ROUTES, KEYS)
    chunks = [client.ask(0, TICKET, BLOCKS, BLOCKS) for _ in range(3)]
    assert client.answer(chunks[-1]).reason == "the producer's worker does not take requests"
    client.done(chunks[-1])
    client.close()
    client.done(chunks[0])
    context.term()
