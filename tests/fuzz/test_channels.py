"""Odd messages to both ends of both channels; an honest peer is served meanwhile and afterwards.

KVFERRY_FUZZ_SECONDS and KVFERRY_FUZZ_SEED set how long and which. A failure names the seed.
"""

import socket
import threading
import time
from contextlib import ExitStack, suppress

import numpy as np
import pytest
import zmq

from fuzz.judge import Costs, judged, seconds, seed
from fuzz.odd import Odd
from fuzz.reached import Reached, methods
from fuzz.rigs import BLOCKS, HOST, STRIDE, Rig, Worker, alive, keep, meet, until
from fuzz.seeds import CONTENT, gather_replies, gather_requests, replies, requests
from kvferry.planning.nest import Nest
from kvferry.planning.plane import PoolNests
from kvferry.transport import check_ranks, gather_messages, handshake, messages
from kvferry.transport.control_client import ControlClient
from kvferry.transport.control_server import Card, ControlServer
from kvferry.transport.gather_client import GatherClient
from kvferry.transport.gather_messages import Done, Gather, Gathered, GatherRoute, Introduce, encode
from kvferry.transport.gather_server import GatherServer
from kvferry.transport.handshake import Handshakes, Looking
from kvferry.transport.inbox import Inbox
from kvferry.transport.lease import LeaseWord
from kvferry.transport.messages import PROTOCOL, Accepted, Ranks, encode as encode_reply
from transport.cards import cards, facts, ticket

pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]


@pytest.fixture
def rig():
    with ExitStack() as stack:
        yield Rig(stack)


def until_over(step, each: int = 50):
    """Call `step` until the time is over, and nothing else; yields after every `each` calls."""
    deadline, number = time.monotonic() + seconds(), 0
    while time.monotonic() < deadline:
        step()
        number += 1
        if number % each == 0:
            yield number


def said(reached: Reached, least: float) -> None:
    """Print which share of the handlers' lines was reached, and judge it."""
    print(f"seed {seed()}: {reached.share:.0%} of {reached.lines} lines; missed {reached.missed}")
    assert reached.share >= least, reached.missed


def test_a_producer_serves_on_whatever_a_peer_with_the_key_says(rig, caplog):
    odd = Odd(seed(), requests())
    handlers = [ControlServer._serve, ControlServer._met, Card.answer, Inbox.put]
    with Reached(*handlers, messages.decode_request, messages.compare) as reached:
        server, honest = rig.server(), rig.client()
        server._serve = cost = Costs(server._serve)
        meet(honest, server.port)
        liar, slowest = rig.socket(server.port), 0.0
        keep(honest, server)
        with judged(caplog, cost):
            for _ in until_over(lambda: liar.send_multipart(odd.frames())):
                slowest = max(slowest, meet(honest, server.port))
                alive(server)
        assert server._thread.is_alive()
        assert honest._thread.is_alive()
        meet(honest, server.port)
    print(
        f"{cost.calls} messages, {cost.most * 1e3:.1f} ms at most; handshake {slowest * 1e3:.0f} ms at most"
    )
    assert server.rejected
    said(reached, 0.75)


def test_a_consumer_goes_on_whatever_a_peer_with_the_key_answers(rig, caplog, monkeypatch):
    monkeypatch.setattr(handshake, "REFUSAL_SECONDS", 0.0)
    odd = Odd(seed(), replies())
    good = [[encode_reply(Accepted(facts()))], [encode_reply(Ranks(list(cards())))]]

    def lies() -> list[list[bytes]]:
        kind = odd.draw.random()
        if kind < 0.3:
            return [odd.frames()]
        if kind < 0.8:
            return [good[0], odd.frames()]
        return [*good, *(odd.frames() for _ in range(5))]

    handlers = methods(Handshakes, without=("__init__", "crowded", "deadlines"))
    checks = [
        one for one in vars(check_ranks).values() if getattr(one, "__module__", "") == check_ranks.__name__
    ]
    with Reached(
        ControlClient._receive, *handlers, *checks, messages.decode_reply, messages.numbered
    ) as reached:
        server, consumer = rig.server(), rig.client(0.5)
        consumer._receive = cost = Costs(consumer._receive)
        port = rig.hostile(lies)
        meet(consumer, server.port)
        keep(consumer, server)

        def ask() -> None:
            consumer.forget((HOST, port))
            consumer.look_up((HOST, port), 1)
            number = consumer.redeem((HOST, port), ticket("x"), 4, CONTENT)
            until(lambda: not isinstance(consumer.look_up((HOST, port), 1), Looking), 5.0, "an end")
            if consumer.end_redemption(number):
                consumer.release((HOST, port), ticket("x"))

        with judged(caplog, cost):
            for _ in until_over(ask, each=10):
                meet(consumer, server.port)
                alive(server)
        assert consumer._thread.is_alive()
        meet(consumer, server.port)
    print(f"{cost.calls} messages, {cost.most * 1e3:.1f} ms at most")
    said(reached, 0.75)


def test_a_worker_gathers_on_whatever_a_reader_with_the_key_says(rig, caplog):
    handlers = methods(GatherServer, without=("__init__", "close", "_run"))
    checks = [gather_messages.decode_request, gather_messages._check, gather_messages._check_route]
    with Reached(*handlers, *checks, gather_messages._check_nest) as reached:
        worker = Worker(rig)
        worker.server._serve = cost = Costs(worker.server._serve)
        odd = Odd(seed(), gather_requests(worker.address, STRIDE, BLOCKS))
        honest, liar = rig.socket(worker.server.port), rig.socket(worker.server.port)
        route = GatherRoute(STRIDE, BLOCKS, 64, (PoolNests((0,), (Nest(worker.address, 0, 64),)),))

        def served() -> None:
            """Have a block gathered, and look at it."""
            for message in (
                Introduce(PROTOCOL, [route]),
                Gather(1, 0, 0, 0, np.array([3], np.int32).tobytes(), 0),
            ):
                honest.send(encode(message))
            assert honest.poll(30_000), "no answer"
            found = gather_messages.decode_reply(honest.recv())
            if isinstance(found, Gathered):
                assert worker.image(found.position, 64) == bytes(worker.pool[3 * STRIDE :][:64])
            else:
                assert "no room" in found.reason, "what it was asked before holds the area"
            honest.send(encode(Done(1)))

        served()
        with judged(caplog, cost):
            for _ in until_over(lambda: liar.send_multipart(odd.frames())):
                served()
        assert worker.server._thread.is_alive()
    print(f"{cost.calls} messages, {cost.most * 1e3:.1f} ms at most")
    said(reached, 0.75)


def test_a_reader_goes_on_whatever_a_worker_with_the_key_answers(rig, caplog):
    odd = Odd(seed(), gather_replies())
    route = GatherRoute(STRIDE, BLOCKS, 64, (PoolNests((0,), (Nest(0, 0, 64),)),))
    handlers = [GatherClient._receive, GatherClient.answer, GatherClient.ask, GatherClient._introduce]
    with Reached(*handlers, gather_messages.decode_reply) as reached:
        port = rig.hostile(lambda: [odd.frames() for _ in range(3)])
        context = rig.socket(port).context
        reader = GatherClient(context, HOST, port, [route], rig.keys)
        rig.stack.callback(reader.close)
        lease = LeaseWord(3, 9, 1)
        asked: list[int] = []

        def ask() -> None:
            asked.append(reader.ask(0, lease, np.array([1, 2]), 0))
            time.sleep(0.001)
            for chunk in asked[-5:]:
                reader.answer(chunk)
            if len(asked) > 5:
                reader.done(asked.pop(0))

        cost = Costs(ask)
        with judged(caplog, cost):
            for _ in until_over(cost):
                assert len(reader._wanted) + len(reader._answers) < 20
    print(f"{cost.calls} rounds, {cost.most * 1e3:.1f} ms at most")
    said(reached, 0.90)


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"


def stranger(draw) -> list[bytes]:
    """Return what somebody without the key sends on a connection, in pieces."""
    curve = GREETING + b"CURVE".ljust(20, b"\0") + bytes(32)
    null = GREETING + b"NULL".ljust(20, b"\0") + bytes(32)
    hello = b"\x04\xc8\x05HELLO" + draw.randbytes(194)
    return draw.choice(
        [
            [],
            [draw.randbytes(draw.choice((1, 10, 64, 4000)))],
            [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"],
            [GREETING[: draw.randrange(len(GREETING))]],
            [null, b"\x04\x19\x05READY" + draw.randbytes(19)],
            [curve, hello, draw.randbytes(500)],
            [curve, b"\x06" + (2**62).to_bytes(8, "big") + b"\x05HELLO"],
            [curve, b"\x06" + (4 << 20).to_bytes(8, "big") + bytes(100_000)],
            [curve, b"\x04\x05\x05HELL"],
            [bytes([byte]) for byte in curve[:20]],
            [curve, *(b"\x04\x00" for _ in range(50))],
        ]
    )


def test_strangers_without_the_key_cost_a_known_peer_nothing(rig, caplog):
    server, honest, draw = rig.server(), rig.client(), Odd(seed(), [b""]).draw
    meet(honest, server.port)
    keep(honest, server)
    slow: list[socket.socket] = []
    wrong = rig.socket(server.port, authentic=False)
    number = 0

    def connect() -> None:
        nonlocal number
        number += 1
        one = socket.create_connection((HOST, server.port), timeout=10)
        try:
            for piece in stranger(draw):
                one.sendall(piece)
        except OSError:
            pass  # it was closed on us, as it should be
        if draw.random() < 0.3 and len(slow) < 30:
            slow.append(one)
        else:
            one.close()

    with judged(caplog):
        for _ in until_over(connect, each=20):
            with suppress(zmq.Again):  # few wait for a connection that never comes about
                wrong.send(requests()[0], zmq.NOBLOCK)
            meet(honest, server.port)
            alive(server)
        for one in slow:
            one.close()
        until(lambda: server._listener._connections.open <= 3, 20.0, "strangers are gone")
    assert not server.rejected, "what strangers say is never read"
    assert not wrong.poll(100), "nor answered"
    assert threading.active_count() < 30
    print(f"{number} strangers")
