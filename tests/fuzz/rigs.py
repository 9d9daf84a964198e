"""Real ends of both channels, an honest peer beside them, and whoever says odd things."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import zmq

from fuzz.seeds import CONTENT, GRANT, TOKENS
from kvferry.geometry import Region
from kvferry.geometry.rank import RankGeometry
from kvferry.planning.template import absent_layer_names
from kvferry.transport import security
from kvferry.transport.control_client import ControlClient
from kvferry.transport.control_server import ControlServer
from kvferry.transport.costs import TransferSettings
from kvferry.transport.gather_server import GatherServer
from kvferry.transport.handshake import Pending
from kvferry.transport.lease import LeaseWords
from kvferry.transport.messages import PeerInfo
from kvferry.transport.redeem import Redeemed
from kvferry.transport.staging import UNIT_BYTES, StagingArea
from support.memory import memory
from support.waiting import wait_for
from transport.cards import cards, facts, ticket

HOST = "127.0.0.1"
BLOCKS, STRIDE, LEASES, UNITS, INCARNATION = 8, 4096, 4, 3, 77
HONEST_RUN = 987_654_321
"""Of the honest consumer: no message of a fuzzer has it by chance."""


def new_keys() -> security.Keys:
    """Return the key that peers share."""
    public, secret = zmq.curve_keypair()
    return security.Keys(public, secret)


class Rig:
    """Makes both ends; they end with the stack."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack, self.keys = stack, new_keys()

    def server(self) -> ControlServer:
        """Return a producer's end, of one rank."""
        server = ControlServer(HOST, 0, PeerInfo(facts(), cards()), self.keys)
        self.stack.callback(server.close)
        return server

    def client(self, seconds: float = 5.0) -> ControlClient:
        """Return a consumer's end that checks ranks as an engine does."""
        ours = [card.geometry for card in cards()]

        def check(ranks: Any) -> None:
            absent_layer_names([card.geometry for card in ranks], ours)

        client = ControlClient(
            facts("D", HONEST_RUN), check, self.keys, handshake_seconds=seconds, heartbeat_seconds=0.1
        )
        self.stack.callback(client.close)
        return client

    def socket(self, port: int, *, authentic: bool = True) -> zmq.Socket[bytes]:
        """Return a socket that says what it likes."""
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.linger, dealer.sndhwm, dealer.sndtimeo = 0, 8, 10_000
        security.secure_client(dealer, self.keys if authentic else new_keys())
        dealer.connect(f"tcp://{HOST}:{port}")
        self.stack.callback(context.term)
        self.stack.callback(dealer.close)
        return dealer

    def hostile(self, replies: Callable[[bytes], list[list[bytes]]]) -> int:
        """Return the port of a peer with the key that answers each message with what `replies` returns."""
        context = zmq.Context()
        router = context.socket(zmq.ROUTER)
        router.linger = 0
        security.secure_server(router, self.keys)
        port = router.bind_to_random_port(f"tcp://{HOST}")
        stop = threading.Event()

        def run() -> None:
            while not stop.is_set():
                if router.poll(20):
                    sender, said = router.recv_multipart()
                    for frames in replies(said):
                        router.send_multipart([sender, *frames])

        thread = threading.Thread(target=run, name="hostile")
        thread.start()
        for undo in (context.term, router.close, thread.join, stop.set):
            self.stack.callback(undo)
        return int(port)


def meet(client: ControlClient, port: int) -> float:
    """Shake hands anew; return the seconds that it took."""
    client.forget((HOST, port))
    began = time.monotonic()
    answer = wait_for(lambda: None if isinstance(a := client.look_up((HOST, port), 1), Pending) else a)
    assert isinstance(answer, PeerInfo), answer
    return time.monotonic() - began


def keep(client: ControlClient, server: ControlServer) -> None:
    """Have a lease, of the name ``honest``, that the client keeps alive."""
    server.tickets.withdraw(["honest"])  # a ticket names one lease
    server.tickets.publish(ticket("honest"), "honest", TOKENS, CONTENT, GRANT)
    assert redeem(client, server.port).grant == GRANT


def redeem(client: ControlClient, port: int) -> Redeemed:
    """Redeem the ticket of the name ``honest``; return the answer, however slow the machine is."""

    def answered() -> Redeemed | None:
        client.look_up((HOST, port))
        asked = client.redeem((HOST, port), ticket("honest"), TOKENS, CONTENT)
        answer = wait_for(lambda: None if isinstance(a := client.answer(asked), Pending) else a)
        client._redemptions.end(asked)  # without a release, so that the lease is kept alive
        assert isinstance(answer, Redeemed) or "no answer" in answer.reason, answer
        return answer if isinstance(answer, Redeemed) else None

    return wait_for(answered)


def alive(server: ControlServer) -> None:
    """Wait for a heartbeat of that lease; takes all that has been heard."""
    wait_for(lambda: any("honest" in heard.leases for heard in server.events))
    server.events.clear()


class Worker:
    """A worker that gathers, over a pool of noise."""

    def __init__(self, rig: Rig) -> None:
        self.pool = np.random.default_rng(1).integers(0, 256, BLOCKS * STRIDE, np.uint8)
        self.address = int(self.pool.ctypes.data)
        region = Region(self.address, len(self.pool))
        self.area = StagingArea(UNITS * UNIT_BYTES, region)
        self.words = LeaseWords(INCARNATION, LEASES)
        first = self.words.add(UNITS)
        geometry = RankGeometry(0, 1, 0, 1, BLOCKS, (), (region,))
        settings = TransferSettings(host=HOST, keys=rig.keys)
        self.server = GatherServer(geometry, self.area, self.words, first, settings)
        rig.stack.callback(self.server.close)

    def image(self, position: int, stride: int) -> bytes:
        """Return the image at a position of the area."""
        return bytes(memory(self.area.region)[position * stride : (position + 1) * stride])
