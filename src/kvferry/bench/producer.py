"""The process that is read from: what a prefill engine has, without the engine.

A pool of marked pages, a transfer thread that registered it, a control server, and a lease book. The reader
asks for tickets through a pipe, as a request's parameters would carry them; everything else goes over the
control channel.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

from kvferry.bench.pool import Pool
from kvferry.bench.shapes import Shape
from kvferry.errors import KVFerryError
from kvferry.transport.control_server import Card, ControlServer
from kvferry.transport.lease import LeaseBook, LeaseWords, Ticket, new_incarnation
from kvferry.transport.messages import Facts, Heartbeat
from kvferry.transport.thread import TransferThread

LEASE_SLOTS = 1024
LEASE_SECONDS = 60.0
_HOST = "127.0.0.1"
_TICK_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class Listening:
    """The producer is up.

    Attributes:
        address: of its control channel.
        incarnation: which run of it.
    """

    address: tuple[str, int]
    incarnation: int


@dataclass(frozen=True, slots=True)
class AskTicket:
    """Asks for a lease of that name; answered with a Ticket."""

    lease: str


@dataclass(frozen=True, slots=True)
class AskEnded:
    """Asks to be told when no lease is held any more; answered with Ended."""


@dataclass(frozen=True, slots=True)
class Ended:
    """No lease is held."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """The producer cannot go on; why."""

    reason: str


def produce(pipe: Connection, shape: Shape, num_blocks: int, settings: dict[str, str]) -> None:
    """Serve until the other end of `pipe` closes; the main function of the process.

    Args:
        pipe: to the reader.
        shape: what the blocks hold.
        num_blocks: how many, the null block among them.
        settings: environment variables for the transport.
    """
    # Ctrl-C reaches the whole process group; the reader ends this process by closing the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(settings)
    try:
        producer = _Producer(shape, num_blocks)
    except KVFerryError as error:
        pipe.send(Trouble(str(error)))
        return
    try:
        producer.serve(pipe)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    finally:
        producer.close()


class _Producer:
    def __init__(self, shape: Shape, num_blocks: int) -> None:
        pool = Pool(shape, num_blocks)
        pool.mark()
        self._pool = pool
        self._words = LeaseWords(new_incarnation(), LEASE_SLOTS)
        self._incarnation = new_incarnation()
        self._book = LeaseBook(self._incarnation, LEASE_SLOTS, LEASE_SECONDS, time.monotonic)
        self._thread = TransferThread(f"bench-producer/{self._incarnation:x}", pool.geometry, self._words)
        facts = Facts("bench-producer", self._incarnation, "kvferry bench", {})
        self._server = ControlServer(_HOST, 0, Card(facts, (self._thread.card,)))

    def serve(self, pipe: Connection) -> None:
        """Answer until the pipe closes."""
        pipe.send(Listening((_HOST, self._server.port), self._incarnation))
        while True:
            waited_for = pipe.recv() if pipe.poll(_TICK_SECONDS) else None
            self._hear()
            if isinstance(waited_for, AskTicket):
                pipe.send(self._grant(waited_for.lease))
            elif isinstance(waited_for, AskEnded):
                while len(self._book):
                    time.sleep(_TICK_SECONDS)
                    self._hear()
                pipe.send(Ended())

    def close(self) -> None:
        """End both threads."""
        self._server.close()
        self._thread.close()

    def _grant(self, lease: str) -> Ticket | Trouble:
        try:
            return self._book.grant(lease)
        except KVFerryError as error:
            return Trouble(str(error))

    def _hear(self) -> None:
        """What an engine does between steps: end the leases that consumers released."""
        ending = dict[str, int]()
        while self._server.events:
            event = self._server.events.popleft()
            if isinstance(event, Heartbeat):
                self._book.extend(event.leases)
            else:
                ending.update(self._book.end(event.leases))
        ending.update(self._book.end_expired())
        self._words.end(ending.values())
        for lease in ending:
            self._book.ended(lease)
