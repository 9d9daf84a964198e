"""The main function of the producer, the process that is read from: prefill engines without a model.

In a real system, request parameters carry the tickets. Here the reader gets them through a pipe, and redeems
them over the control channels.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from kvferry.common.errors import KVFerryError
from kvferry.tools.measuring.simulated import SimulatedEngine, fill_blocks
from kvferry.transport.control_server import ControlServer, LeasesClaimed, ProducerCard
from kvferry.transport.costs import TransferSettings
from kvferry.transport.lease import LeaseBook, LeaseWords, new_incarnation
from kvferry.transport.messages import Facts
from kvferry.transport.redeem import Grant, PromptContent, new_ticket
from kvferry.transport.security import Keys
from kvferry.transport.transfers import Transfers

LEASE_SLOTS = 1024
LEASE_SECONDS = 60.0
# Empty, because the reader knows the block tables and has no prompt.
CONTENT = PromptContent("")
_HOST = "127.0.0.1"
# Stands for an engine step. Leases end only between steps.
_TICK_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class Listening:
    """The producer's engines are ready.

    Attributes:
        addresses: host and port of each engine's control channel, in the order of the engines.
    """

    addresses: tuple[tuple[str, int], ...]
    incarnation: int


@dataclass(frozen=True, slots=True)
class AskTicket:
    """Grant a lease of this name. The answer is `Granted`, or `ProducerFailed`."""

    engine: int
    lease: str


@dataclass(frozen=True, slots=True)
class Granted:
    """The lease is granted under this ticket."""

    ticket: bytes


@dataclass(frozen=True, slots=True)
class AllEnded:
    """Sent to the producer, which sends it back when all leases have ended."""


@dataclass(frozen=True, slots=True)
class ProducerFailed:
    """The producer fails, or cannot grant a lease."""

    reason: str


def produce(
    pipe: Connection, engines: Sequence[SimulatedEngine], settings: dict[str, str], keys: Keys
) -> None:
    """Run engines without a model in this process until the other end of `pipe` closes.

    Args:
        settings: environment variables to set, such as UCX_TLS.
        keys: CURVE keys of all channels.
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
        elif isinstance(request, AllEnded):
            while any(producer.leases for producer in producers):
                time.sleep(_TICK_SECONDS)
                for producer in producers:
                    producer.end_released()
            pipe.send(request)


class _ServedEngine:
    """An engine in the producer's process: KV cache and threads of each rank, control server, lease book."""

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
        return len(self._book)

    def close(self) -> None:
        self._server.close()
        for thread in self._threads:
            thread.close()

    def grant(self, lease: str) -> Granted | ProducerFailed:
        """Grant a lease, and publish a ticket for it; or return the reason why it cannot be granted."""
        try:
            word = self._book.grant(lease)
        except KVFerryError as error:
            return ProducerFailed(str(error))
        ticket = new_ticket()
        self._server.tickets.publish(ticket, lease, 1, CONTENT, Grant.of(word.slot, word.generation, []))
        return Granted(ticket)

    def end_released(self) -> None:
        """End all leases that were released or have expired, and extend those that were claimed."""
        ending = dict[str, int]()
        while self._server.events:
            event = self._server.events.popleft()
            if isinstance(event, LeasesClaimed):
                self._book.extend(event.leases)
            else:
                ending.update(self._book.end(event.leases))
        ending.update(self._book.end_expired())
        # In the order of an engine: no reader may claim the lease from here on, and then its word changes.
        self._server.tickets.withdraw(ending)
        for thread in self._threads:
            thread.words.end(ending.values())
        for lease in ending:
            self._book.ended(lease)
