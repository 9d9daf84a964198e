"""The main function of the process that is read from: prefill engines without a model.

Every rank of every engine has a cache with the request's content, registered for reading. Every engine has a
control server and a lease book. The reader gets tickets through a pipe, where a request's parameters would
carry them, and redeems them over the control channels.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from kvferry.errors import KVFerryError
from kvferry.measuring.content import fill_blocks
from kvferry.measuring.simulated import SimulatedEngine
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
"""Content of every request. It is empty because the reader knows the block tables."""
_HOST = "127.0.0.1"
_TICK_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class Listening:
    """The message that the producer is ready.

    Attributes:
        addresses: host and port of each engine's control channel, in the order of the engines.
        incarnation: identifies this run of the engines.
    """

    addresses: tuple[tuple[str, int], ...]
    incarnation: int


@dataclass(frozen=True, slots=True)
class AskTicket:
    """The request for a lease of that name at one engine. The answer is a `Granted`."""

    engine: int
    lease: str


@dataclass(frozen=True, slots=True)
class Granted:
    """The answer that a lease is held.

    Attributes:
        ticket: ticket to redeem for it.
    """

    ticket: bytes


@dataclass(frozen=True, slots=True)
class AskEnded:
    """The request to answer `AllEnded` when no lease is held any more."""


@dataclass(frozen=True, slots=True)
class AllEnded:
    """The answer that no lease is held."""


@dataclass(frozen=True, slots=True)
class ProducerFailed:
    """The answer that the producer failed, with the reason."""

    reason: str


def produce(
    pipe: Connection, engines: Sequence[SimulatedEngine], settings: dict[str, str], keys: Keys
) -> None:
    """Serve until the other end of `pipe` closes.

    Args:
        pipe: connection to the reader.
        engines: engines to hold.
        settings: environment variables for the transport.
        keys: CURVE keys of all channels.
    """
    # Ctrl-C reaches the whole process group; the reader ends this process by closing the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(settings)
    producers: list[_ServedEngine] = []
    try:
        incarnation = new_incarnation()
        # One by one, so that those that are up are closed when the next one fails.
        producers.extend(_ServedEngine(engine, incarnation, keys) for engine in engines)
        _serve(pipe, producers, incarnation)
    except KVFerryError as error:
        pipe.send(ProducerFailed(str(error)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    finally:
        for producer in producers:
            producer.close()


def _serve(pipe: Connection, producers: Sequence[_ServedEngine], incarnation: int) -> None:
    pipe.send(Listening(tuple(producer.address for producer in producers), incarnation))
    while True:
        asked = pipe.recv() if pipe.poll(_TICK_SECONDS) else None
        for producer in producers:
            producer.end_released()
        if isinstance(asked, AskTicket):
            pipe.send(producers[asked.engine].grant(asked.lease))
        elif isinstance(asked, AskEnded):
            while any(producer.leases for producer in producers):
                time.sleep(_TICK_SECONDS)
                for producer in producers:
                    producer.end_released()
            pipe.send(AllEnded())


class _ServedEngine:
    """The ranks and the scheduler's parts of one engine.

    Attributes:
        address: host and port of the control channel.
    """

    def __init__(self, engine: SimulatedEngine, incarnation: int, keys: Keys) -> None:
        self._caches = [engine.allocated(rank) for rank in range(engine.shape.ranks)]
        self._threads: list[Transfers] = []
        for number, cache in enumerate(self._caches):
            fill_blocks(cache, engine)
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
        """Number of leases that are held."""
        return len(self._book)

    def close(self) -> None:
        """Stop all threads."""
        self._server.close()
        for thread in self._threads:
            thread.close()

    def grant(self, lease: str) -> Granted | ProducerFailed:
        """Take a lease of that name, and publish a ticket for it."""
        try:
            word = self._book.grant(lease)
        except KVFerryError as error:
            return ProducerFailed(str(error))
        ticket = new_ticket()
        self._server.tickets.publish(ticket, lease, 1, CONTENT, Grant.of(word.slot, word.generation, []))
        return Granted(ticket)

    def end_released(self) -> None:
        """End the leases that consumers released or that expired, as an engine does between steps."""
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
