"""The producer: a process with prefill engines without a model, which is read from, and a handle to it.

In a real system, request parameters carry the tickets. Here the reader gets them through a pipe, and redeems
them over the control channels.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Self, TypeVar

from kvferry.common.errors import KVFerryError, TransferError
from kvferry.tools.measuring.simulated import SimulatedEngine, fill_blocks
from kvferry.transport import (
    ControlServer,
    Facts,
    Grant,
    Keys,
    LeaseBook,
    LeaseWords,
    PeerInfo,
    PromptContent,
    Transfers,
    TransferSettings,
    new_incarnation,
    new_ticket,
    random_keys,
)

_LEASE_SLOTS = 1024
_LEASE_SECONDS = 60.0
# Empty, because the reader knows the block tables and has no prompt.
CONTENT = PromptContent("")
_HOST = "127.0.0.1"
# Stands for an engine step. Leases end only between steps.
_TICK_SECONDS = 0.002

_START_SECONDS = 120.0
_ANSWER_SECONDS = 30.0
_END_SECONDS = 15.0
_MOVE_SECONDS = 60.0
_CHECK_SECONDS = 0.2

_AnswerT = TypeVar("_AnswerT")


def use_transports(transports: str | None) -> dict[str, str]:
    """Set UCX_TLS in this process, unless it is None, and return the variables for a second process."""
    settings = {} if transports is None else {"UCX_TLS": transports}
    os.environ.update(settings)
    return settings


class ProducerProcess:
    """A handle to the producer, a process that runs the engines to read from.

    Leaving its context ends the process. If the process has died, every method that needs it raises
    TransferError with the reason.
    """

    def __init__(
        self, engines: Sequence[SimulatedEngine], settings: Mapping[str, str], host: str = _HOST
    ) -> None:
        """Start the process, and wait until its engines can be read from. Raise TransferError on failure.

        Args:
            engines: engines to read from.
            settings: environment variables of the process.
            host: IP address that the process listens on.
        """
        # A forked process would have NIXL's and ZeroMQ's sockets and locks, without their threads.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.keys = random_keys()
        self._process = context.Process(
            target=_produce,
            args=(theirs, tuple(engines), dict(settings), self.keys, host),
            name="bench-producer",
            daemon=True,
        )
        self._process.start()
        # Else this process would keep the pipe of a dead producer open, and wait for its answer.
        theirs.close()
        try:
            self.listening = self._answer(_Listening, _START_SECONDS)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def address(self, engine: int) -> tuple[str, int]:
        return self.listening.addresses[engine]

    def grant(self, engine: int, lease: str) -> bytes:
        """Make an engine grant a lease of this name, and return the ticket."""
        self._say(_AskTicket(engine, lease))
        return self._answer(_Granted, _ANSWER_SECONDS).ticket

    def wait_ended(self) -> None:
        self._say(_AllEnded())
        self._answer(_AllEnded, _ANSWER_SECONDS)

    def check(self) -> None:
        if not self._process.is_alive():
            raise TransferError(self._death())

    def close(self) -> None:
        """End the producer process, and kill it if it does not end in time."""
        # The producer ends when the pipe does.
        self._pipe.close()
        self._process.join(_END_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _say(self, message: object) -> None:
        try:
            self._pipe.send(message)
        except OSError as error:
            raise TransferError(self._death()) from error

    def _answer(self, kind: type[_AnswerT], seconds: float) -> _AnswerT:
        try:
            # A producer that hangs is reported, and not waited for.
            if not self._pipe.poll(seconds):
                raise TransferError(f"the producer process gave no answer within {seconds:g} s")
            answer: Any = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise TransferError(self._death()) from error
        if isinstance(answer, _ProducerFailed):
            raise TransferError(f"the producer process: {answer.reason}")
        if not isinstance(answer, kind):
            raise TransferError(f"the producer process answered {answer!r}, expected a {kind.__name__}")
        return answer

    def _death(self) -> str:
        self._process.join(_END_SECONDS)
        code = self._process.exitcode
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return f"the producer process (pid {self.pid}) died: {how}"


class WaitLimit:
    """A limit of `_MOVE_SECONDS` and a health check for a loop that polls another process."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        now = time.monotonic()
        self._end, self._next = now + _MOVE_SECONDS, now + _CHECK_SECONDS

    def check(self) -> None:
        """Raise TransferError if the other process has died, or if the time limit has passed."""
        now = time.monotonic()
        # Cheap enough for every iteration of a loop that measures microseconds.
        if now < self._next:
            return
        self._next = now + _CHECK_SECONDS
        self._check()
        if now > self._end:
            raise TransferError(f"a transfer was not done after {_MOVE_SECONDS:g} s")


@dataclass(frozen=True, slots=True)
class _Listening:
    """The producer's engines are ready."""

    addresses: tuple[tuple[str, int], ...]
    incarnation: int


@dataclass(frozen=True, slots=True)
class _AskTicket:
    """Grant a lease of this name. The answer is `_Granted`, or `_ProducerFailed`."""

    engine: int
    lease: str


@dataclass(frozen=True, slots=True)
class _Granted:
    """The lease is granted under this ticket."""

    ticket: bytes


@dataclass(frozen=True, slots=True)
class _AllEnded:
    """Sent to the producer, which sends it back when all leases have ended."""


@dataclass(frozen=True, slots=True)
class _ProducerFailed:
    """The producer fails, or cannot grant a lease."""

    reason: str


def _produce(
    pipe: Connection, engines: Sequence[SimulatedEngine], settings: dict[str, str], keys: Keys, host: str
) -> None:
    # Ignore Ctrl-C, which reaches the whole process group. The reader ends this process by closing the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(settings)
    producers: list[_ServedEngine] = []
    try:
        incarnation = new_incarnation()
        # Add the engines one by one, so that those already added are closed if the next one fails.
        producers.extend(_ServedEngine(engine, incarnation, keys, host) for engine in engines)
        _serve(pipe, producers, incarnation)
    except KVFerryError as error:
        pipe.send(_ProducerFailed(str(error)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    finally:
        for producer in producers:
            producer.close()


def _serve(pipe: Connection, producers: Sequence[_ServedEngine], incarnation: int) -> None:
    pipe.send(_Listening(tuple(producer.address for producer in producers), incarnation))
    while True:
        request = pipe.recv() if pipe.poll(_TICK_SECONDS) else None
        for producer in producers:
            producer.end_released()
        if isinstance(request, _AskTicket):
            pipe.send(producers[request.engine].grant(request.lease))
        elif isinstance(request, _AllEnded):
            while any(producer.leases for producer in producers):
                time.sleep(_TICK_SECONDS)
                for producer in producers:
                    producer.end_released()
            pipe.send(request)


class _ServedEngine:
    """An engine in the producer's process: KV cache and threads of each rank, control server, lease book."""

    def __init__(self, engine: SimulatedEngine, incarnation: int, keys: Keys, host: str) -> None:
        self._caches = [engine.allocated(rank) for rank in range(engine.shape.ranks)]
        self._threads: list[Transfers] = []
        for number, cache in enumerate(self._caches):
            fill_blocks(cache, engine)
            words = LeaseWords(new_incarnation(), _LEASE_SLOTS)
            settings = TransferSettings(keys=keys, host=host, advertise_host=host)
            name = f"bench-producer/{engine.name}/{number}/{words.incarnation:x}"
            self._threads.append(Transfers(name, cache.geometry, words, settings))
        self._book = LeaseBook(incarnation, _LEASE_SLOTS, _LEASE_SECONDS, time.monotonic)
        facts = Facts(f"bench-producer/{engine.name}", incarnation, "kvferry bench", {})
        cards = tuple(thread.card for thread in self._threads)
        self._server = ControlServer(host, 0, PeerInfo(facts, cards), keys)
        self.address = (host, self._server.port)

    @property
    def leases(self) -> int:
        return len(self._book)

    def close(self) -> None:
        self._server.close()
        for thread in self._threads:
            thread.close()

    def grant(self, lease: str) -> _Granted | _ProducerFailed:
        """Grant a lease, and publish a ticket for it; or return the reason why it cannot be granted."""
        try:
            word = self._book.grant(lease)
        except KVFerryError as error:
            return _ProducerFailed(str(error))
        ticket = new_ticket()
        self._server.tickets.publish(ticket, lease, 1, CONTENT, Grant.of(word, 1, []))
        return _Granted(ticket)

    def end_released(self) -> None:
        """End all leases that were released or have expired, and extend those that were claimed."""
        ending = dict[str, int]()
        while self._server.events:
            event = self._server.events.popleft()
            if event.released:
                ending.update(self._book.end(event.leases))
            else:
                self._book.extend(event.leases)
        ending.update(self._book.end_expired())
        # In the order of an engine: no reader may claim the lease from here on, and then its word changes.
        self._server.tickets.withdraw(ending)
        for thread in self._threads:
            thread.words.end(ending.values())
        for lease in ending:
            self._book.ended(lease)
