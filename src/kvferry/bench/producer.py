"""The process that is read from: what prefill engines have, without the engines.

Every rank of every engine has its cache with the request's content and transfers that registered it;
every engine has a control server and a lease book. The reader asks for tickets through a pipe, as a request's
parameters would carry them, and redeems them over the control channels, like everything else.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from kvferry.bench.content import fill
from kvferry.bench.engines import Engine
from kvferry.errors import KVFerryError
from kvferry.transport.control_server import ControlServer, LeasesClaimed, ProducerCard
from kvferry.transport.lease import LeaseBook, LeaseWords, new_incarnation
from kvferry.transport.messages import Facts
from kvferry.transport.redeem import Grant, PromptContent, new_ticket
from kvferry.transport.security import Keys
from kvferry.transport.settings import TransferSettings
from kvferry.transport.transfers import Transfers

LEASE_SLOTS = 1024
LEASE_SECONDS = 60.0
CONTENT = PromptContent("")
"""Of every request; the reader knows the block tables."""
_HOST = "127.0.0.1"
_TICK_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class Listening:
    """The producer is up.

    Attributes:
        addresses: of every engine's control channel, in the order in which they were given.
        incarnation: which run of them.
    """

    addresses: tuple[tuple[str, int], ...]
    incarnation: int


@dataclass(frozen=True, slots=True)
class AskTicket:
    """Asks an engine for a lease of that name; answered with a Granted."""

    engine: int
    lease: str


@dataclass(frozen=True, slots=True)
class Granted:
    """A lease is held.

    Attributes:
        ticket: for it.
    """

    ticket: bytes


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


def produce(pipe: Connection, engines: Sequence[Engine], settings: dict[str, str], keys: Keys) -> None:
    """Serve until the other end of `pipe` closes; the main function of the process.

    Args:
        pipe: to the reader.
        engines: what to hold.
        settings: environment variables for the transport.
        keys: CURVE keys of all channels.
    """
    # Ctrl-C reaches the whole process group; the reader ends this process by closing the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(settings)
    producers: list[_Producer] = []
    try:
        incarnation = new_incarnation()
        # One by one: those that are up are closed when the next cannot be.
        producers.extend(_Producer(engine, incarnation, keys) for engine in engines)
        _serve(pipe, producers, incarnation)
    except KVFerryError as error:
        pipe.send(Trouble(str(error)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    finally:
        for producer in producers:
            producer.close()


def _serve(pipe: Connection, producers: Sequence[_Producer], incarnation: int) -> None:
    pipe.send(Listening(tuple(producer.address for producer in producers), incarnation))
    while True:
        asked = pipe.recv() if pipe.poll(_TICK_SECONDS) else None
        for producer in producers:
            producer.hear()
        if isinstance(asked, AskTicket):
            pipe.send(producers[asked.engine].grant(asked.lease))
        elif isinstance(asked, AskEnded):
            while any(producer.leases for producer in producers):
                time.sleep(_TICK_SECONDS)
                for producer in producers:
                    producer.hear()
            pipe.send(Ended())


class _Producer:
    """One engine's ranks and scheduler.

    Attributes:
        address: of its control channel.
    """

    def __init__(self, engine: Engine, incarnation: int, keys: Keys) -> None:
        self._caches = [engine.allocated(rank) for rank in range(engine.shape.ranks)]
        self._threads: list[Transfers] = []
        for number, cache in enumerate(self._caches):
            fill(cache, engine)
            words, settings = LeaseWords(new_incarnation(), LEASE_SLOTS), TransferSettings(keys=keys)
            name = f"bench-producer/{engine.name}/{number}/{words.incarnation:x}"
            self._threads.append(Transfers(name, cache.geometry, words, settings))
        self._book = LeaseBook(incarnation, LEASE_SLOTS, LEASE_SECONDS, time.monotonic)
        facts = Facts(f"bench-producer/{engine.name}", incarnation, "kvferry bench", {})
        cards = tuple(thread.card for thread in self._threads)
        self._server = ControlServer(_HOST, 0, ProducerCard(facts, cards), keys)
        self.address = (_HOST, self._server.port)

    @property
    def leases(self) -> int:
        """Leases that are held."""
        return len(self._book)

    def close(self) -> None:
        """End all threads."""
        self._server.close()
        for thread in self._threads:
            thread.close()

    def grant(self, lease: str) -> Granted | Trouble:
        """Take a lease."""
        try:
            word = self._book.grant(lease)
        except KVFerryError as error:
            return Trouble(str(error))
        ticket = new_ticket()
        self._server.tickets.publish(ticket, lease, 1, CONTENT, Grant.of(word.slot, word.generation, []))
        return Granted(ticket)

    def hear(self) -> None:
        """What an engine does between steps: end the leases that consumers released."""
        ending = dict[str, int]()
        while self._server.events:
            event = self._server.events.popleft()
            if isinstance(event, LeasesClaimed):
                self._book.extend(event.leases)
            else:
                ending.update(self._book.end(event.leases))
        ending.update(self._book.end_expired())
        self._server.tickets.withdraw(ending)
        for thread in self._threads:
            thread.words.end(ending.values())
        for lease in ending:
            self._book.ended(lease)
