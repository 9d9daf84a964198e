"""The main function of the producer, the process that is read from: prefill engines without a model.

Every rank of every engine has a KV cache with test values, registered for reading. Every engine has a control
server and a lease book, which tracks its leases. A ticket is a random id that claims a lease. In a real
system, request parameters carry the tickets. Here the reader gets them through a pipe, and claims the leases
over the control channels.
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
"""Description of every request's prompt. It is empty, because the reader knows the block tables."""
_HOST = "127.0.0.1"
_TICK_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class Listening:
    """Message that the producer (the process to read from) sends when its engines are ready.

    Attributes:
        addresses: host and port of each engine's control channel, in the order of the engines.
        incarnation: random number that identifies this run of the engines.
    """

    addresses: tuple[tuple[str, int], ...]
    incarnation: int


@dataclass(frozen=True, slots=True)
class AskTicket:
    """Message that asks an engine of the producer (the process to read from) to grant a lease.

    The answer is `Granted`, or `ProducerFailed` if the engine cannot grant the lease.

    Attributes:
        engine: index of the engine in the producer.
        lease: name for the new lease.
    """

    engine: int
    lease: str


@dataclass(frozen=True, slots=True)
class Granted:
    """Answer of the producer (the process to read from) to `AskTicket`: the lease is granted.

    Attributes:
        ticket: random id with which the reader claims the lease.
    """

    ticket: bytes


@dataclass(frozen=True, slots=True)
class AskEnded:
    """Message that asks the producer (the process to read from) to answer when all leases have ended.

    The answer is `AllEnded`.
    """


@dataclass(frozen=True, slots=True)
class AllEnded:
    """Answer of the producer (the process to read from) to `AskEnded`: all leases have ended."""


@dataclass(frozen=True, slots=True)
class ProducerFailed:
    """Message that the producer (the process to read from) sends if it fails or cannot grant a lease.

    Attributes:
        reason: error message.
    """

    reason: str


def produce(
    pipe: Connection, engines: Sequence[SimulatedEngine], settings: dict[str, str], keys: Keys
) -> None:
    """Run engines without a model in this process, so that a reader in another process can read from them.

    Return when the other end of `pipe` closes.

    Args:
        pipe: connection to the process of the reader.
        engines: engines to run in this process.
        settings: environment variables to set, such as UCX_TLS.
        keys: CURVE keys (ZeroMQ encryption) of all channels.
    """
    # Ignore Ctrl-C, which reaches the whole process group. The reader ends this process by closing the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(settings)
    producers: list[_ServedEngine] = []
    try:
        incarnation = new_incarnation()
        # Add the engines one by one, so that those already added are closed if the next one fails.
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
        request = pipe.recv() if pipe.poll(_TICK_SECONDS) else None
        for producer in producers:
            producer.end_released()
        if isinstance(request, AskTicket):
            pipe.send(producers[request.engine].grant(request.lease))
        elif isinstance(request, AskEnded):
            while any(producer.leases for producer in producers):
                time.sleep(_TICK_SECONDS)
                for producer in producers:
                    producer.end_released()
            pipe.send(AllEnded())


class _ServedEngine:
    """An engine in the producer's process, from which another process reads.

    It consists of the KV cache and the threads of each rank, a control server, and a lease book, which tracks
    the engine's leases.

    Attributes:
        address: host and port of the engine's control channel.
    """

    def __init__(self, engine: SimulatedEngine, incarnation: int, keys: Keys) -> None:
        """Allocate the KV cache of all ranks and fill it with test values. Start all threads and the server.

        Args:
            engine: engine to run.
            incarnation: random number that identifies this run of the engine.
            keys: CURVE keys (ZeroMQ encryption) of all channels.
        """
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
        """Return the number of this engine's leases that have not ended."""
        return len(self._book)

    def close(self) -> None:
        """Close the control server, and end the threads of all ranks."""
        self._server.close()
        for thread in self._threads:
            thread.close()

    def grant(self, lease: str) -> Granted | ProducerFailed:
        """Grant a lease, and publish a ticket (random id) with which a reader can claim the lease.

        Args:
            lease: name for the new lease.

        Returns:
            The ticket; or the reason why the lease cannot be granted.
        """
        try:
            word = self._book.grant(lease)
        except KVFerryError as error:
            return ProducerFailed(str(error))
        ticket = new_ticket()
        self._server.tickets.publish(ticket, lease, 1, CONTENT, Grant.of(word.slot, word.generation, []))
        return Granted(ticket)

    def end_released(self) -> None:
        """End all leases that the reader has released or that have expired, as an engine does between steps.

        Also extends the leases that the reader has claimed.
        """
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
