"""Odd messages to both ends of both channels; an honest peer is served meanwhile and afterwards.

The short list sends a fixed number of messages. In the long list, KVFERRY_FUZZ_SECONDS says for how long each
fuzzer runs. KVFERRY_FUZZ_SEED says which messages they send; a failure names it.
"""

import socket
import threading
import time
from contextlib import ExitStack, suppress

import numpy as np
import pytest
import zmq

from fuzz.asking import Consumer, Reader, again
from fuzz.judge import Costs, holds_nothing, judged, seconds, seed
from fuzz.model import Model
from fuzz.odd import Odd
from fuzz.reached import Reached, functions, methods
from fuzz.rigs import BLOCKS, HOST, STRIDE, Rig, Worker, alive, keep, meet, redeem
from fuzz.seeds import (
    GRANT,
    gather_requests,
    requests,
)
from kvferry.planning.cell_copy import PoolCopies
from kvferry.planning.strided_copy import StridedCopy
from kvferry.transport import (
    gather_client as gather_messages,
    gather_server,
    messages,
    messages as check_ranks,
    turns,
)
from kvferry.transport.control_client import ControlClient
from kvferry.transport.control_server import ControlServer, FairQueue
from kvferry.transport.gather_client import (
    AnnounceRoutes,
    Done,
    Gather,
    GatherClient,
    Gathered,
    GatherRoute,
)
from kvferry.transport.gather_server import GatherServer
from kvferry.transport.handshake import Handshakes
from kvferry.transport.messages import PROTOCOL, encode
from kvferry.transport.redeem import PromptContent, TicketBook
from kvferry.transport.redemptions import Redemptions
from kvferry.transport.turns import TurnIndex, TurnQueries
from support.waiting import wait_for

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.parametrize(
        "long", [False, pytest.param(True, marks=pytest.mark.long)], ids=["short", "long"]
    ),
]


@pytest.fixture
def rig():
    with ExitStack() as stack:
        yield Rig(stack)


def rounds(step, enough=lambda: True, each: int = 50, least: int = 2000, *, long: bool):
    """Call `step` at least `least` times, and yield after every `each` calls.

    Go on until `enough` returns true, up to ten times as often; in a long run, until its time is over.
    """
    deadline, number = time.monotonic() + (seconds() if long else 0), 0
    while number < least or (number < 10 * least and not enough()) or (long and time.monotonic() < deadline):
        step()
        number += 1
        if number % each == 0:
            yield number


def said(reached: Reached, least: float) -> None:
    """Print which share of the handlers' lines was reached, and judge it."""
    print(f"seed {seed()}: {reached.share:.0%} of {reached.lines} lines; missed {reached.missed}")
    assert reached.share >= least, reached.missed


def test_a_producer_serves_on_whatever_a_peer_with_the_key_says(rig, caplog, long):
    odd = Odd(seed(), requests())
    handlers = [FairQueue.put, *methods(TicketBook, without=("__len__",))]
    handlers += methods(ControlServer, without=("__init__", "close"))
    handlers += [TurnIndex.find, TurnIndex.leases, PromptContent.difference]
    with Reached(*handlers, messages.decode_request, messages.compare_facts) as reached:
        server, honest = rig.server(), rig.client()
        model = Model(server)
        server._listener._answer = cost = Costs(server._listener._answer)
        meet(honest, server.port)
        liar, slowest = rig.socket(server.port), 0.0
        keep(honest, server)

        def say(frames: list[bytes]) -> None:
            liar.send_multipart(frames)
            while liar.poll(0):
                liar.recv_multipart()

        def enough() -> bool:
            return min(model.redeemed, model.ended, model.found) > 5

        with judged(caplog, cost, long=long):
            for _ in rounds(lambda: say(odd.frames()), enough, each=200, least=1000, long=long):
                slowest = max(slowest, meet(honest, server.port))
                alive(server)
                assert redeem(honest, server.port).grant == GRANT
            if long:
                holds_nothing(again(odd, say), lambda: (meet(honest, server.port), alive(server)))
        meet(honest, server.port)
        assert not model.wrong, model.wrong[:5]
    print(
        f"{cost.calls} messages, {cost.most * 1e3:.1f} ms at most; handshake {slowest * 1e3:.0f} ms at most; "
        f"{model.redeemed} redeemed, {model.ended} leases ended, {model.found} turns found"
    )
    assert server.rejected
    assert enough()
    said(reached, 0.80)


def test_a_consumer_goes_on_whatever_a_peer_with_the_key_answers(rig, caplog, monkeypatch, long):
    monkeypatch.setattr(turns, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(turns, "ASK_SECONDS", 0.05)
    handlers = methods(Handshakes, without=("__init__",))
    handlers += methods(Redemptions, TurnQueries, without=("__init__",))
    with Reached(
        ControlClient._receive,
        *handlers,
        *functions(check_ranks),
        messages.decode_reply,
        messages.decode_numbered,
    ) as reached:
        server, consumer = rig.server(), rig.client(0.5)
        consumer._receive = cost = Costs(consumer._receive)
        asking = Consumer(rig, consumer, server.port, lambda: cost.calls)
        meet(consumer, server.port)
        keep(consumer, server)

        def settled() -> None:
            meet(consumer, server.port)
            alive(server)

        def enough() -> bool:
            return min(asking.taken[one] for one in ("Redeemed", "Unusable", "turns")) > 5

        with judged(caplog, cost, long=long):
            for _ in rounds(asking.ask, enough, each=10, least=40, long=long):
                settled()
            if long:
                holds_nothing(asking.repeat, settled)
        assert not consumer._redemptions._asked
        assert not consumer._questions._open
        meet(consumer, server.port)
    print(f"{cost.calls} messages, {cost.most * 1e3:.1f} ms at most; {dict(asking.taken)}")
    assert enough()
    said(reached, 0.75)


def test_a_worker_gathers_on_whatever_a_reader_with_the_key_says(rig, caplog, monkeypatch, long):
    monkeypatch.setattr(gather_server, "WAIT_SECONDS", 0.3)
    handlers = methods(GatherServer, without=("__init__", "close"))
    with Reached(*handlers, *functions(gather_messages)) as reached:
        worker = Worker(rig)
        worker.server._listener._answer = cost = Costs(worker.server._listener._answer)
        odd = Odd(seed(), gather_requests(worker.address, STRIDE, BLOCKS))
        honest, liar = rig.socket(worker.server.port), rig.socket(worker.server.port)
        route = GatherRoute(STRIDE, BLOCKS, 64, (PoolCopies((0,), (StridedCopy(worker.address, 0, 64),)),))

        def served() -> None:
            """Have a block gathered, and look at it."""
            for message in (
                AnnounceRoutes(PROTOCOL, [route]),
                Gather(1, 0, 0, 0, np.array([3], np.int32).tobytes(), bytes(4)),
            ):
                honest.send(encode(message))
            assert honest.poll(30_000), "no answer"
            found = gather_messages.decode_reply(honest.recv())
            if isinstance(found, Gathered):
                assert worker.image(found.position, 64) == bytes(worker.pool[3 * STRIDE :][:64])
            else:
                assert "no room" in found.reason, "what it was asked before holds the area"
            honest.send(encode(Done(1)))

        def say(frames: list[bytes]) -> None:
            liar.send_multipart(frames)
            while liar.poll(0):
                liar.recv_multipart()

        def settled() -> None:
            served()
            wait_for(lambda: not worker.server._waiting)

        served()
        with judged(caplog, cost, long=long):
            for _ in rounds(lambda: say(odd.frames()), each=200, least=1000, long=long):
                served()
            if long:
                holds_nothing(again(odd, say), settled)
    print(f"{cost.calls} messages, {cost.most * 1e3:.1f} ms at most")
    said(reached, 0.75)


def test_a_reader_goes_on_whatever_a_worker_with_the_key_answers(rig, caplog, long):
    handlers = [GatherClient._receive, GatherClient.answer, GatherClient.ask]
    with Reached(*handlers, gather_messages.decode_reply) as reached:
        asking = Reader(rig)
        cost = Costs(asking.ask)
        with judged(caplog, cost, long=long):
            for _ in rounds(cost, least=200, long=long):
                pass
            if long:
                holds_nothing(asking.repeat, lambda: None)
    print(f"{cost.calls} rounds, {asking.messages} answers, {cost.most * 1e3:.1f} ms at most")
    assert asking.messages > cost.calls
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


def test_strangers_without_the_key_cost_a_known_peer_nothing(rig, caplog, long):
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
        for _ in rounds(connect, each=20, least=100, long=long):
            with suppress(zmq.Again):  # few wait for a connection that never comes about
                wrong.send(requests()[0], zmq.NOBLOCK)
            meet(honest, server.port)
            alive(server)
        for one in slow:
            one.close()
        wait_for(lambda: server.connections <= 3)  # strangers are gone
    assert not server.rejected, "what strangers say is never read"
    assert not wrong.poll(100), "nor answered"
    assert threading.active_count() < 30
    print(f"{number} strangers")
