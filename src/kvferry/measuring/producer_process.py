"""A handle to the producer, the process that is read from: start it, send requests to it, end it."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from kvferry.errors import TransferError
from kvferry.measuring.producer_main import (
    AllEnded,
    AskEnded,
    AskTicket,
    Granted,
    Listening,
    ProducerFailed,
    produce,
)
from kvferry.measuring.simulated import SimulatedEngine
from kvferry.transport.security import random_keys

START_SECONDS = 120.0
ANSWER_SECONDS = 30.0
_END_SECONDS = 15.0

AnswerT = TypeVar("AnswerT")


def use_transports(transports: str | None) -> dict[str, str]:
    """Set UCX_TLS in this process, and return the environment variables for a second process.

    Args:
        transports: value of UCX_TLS, UCX's list of transports; None to leave it unchanged.

    Returns:
        UCX_TLS and its value; empty if `transports` is None.
    """
    settings = {} if transports is None else {"UCX_TLS": transports}
    os.environ.update(settings)
    return settings


class ProducerProcess:
    """A handle to the producer, a process that runs the engines to read from.

    The handle is a context manager. Leaving the context ends the process. If the process has died, every
    method that needs the process raises TransferError with the reason.

    Attributes:
        listening: addresses of the engines' control channels, and the number that identifies this run.
        keys: CURVE keys (ZeroMQ encryption) of the engines' channels.
    """

    def __init__(self, engines: Sequence[SimulatedEngine], settings: Mapping[str, str]) -> None:
        """Start the process, and wait until its engines can be read from.

        Args:
            engines: engines to run in the process.
            settings: environment variables to set in the process, such as UCX_TLS.

        Raises:
            TransferError: the process cannot start.
        """
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.keys = random_keys()
        self._process = context.Process(
            target=produce,
            args=(theirs, tuple(engines), dict(settings), self.keys),
            name="bench-producer",
            daemon=True,
        )
        self._process.start()
        theirs.close()
        try:
            self.listening = self._answer(Listening, START_SECONDS)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Return the process id of the producer (the process to read from)."""
        return self._process.pid or 0

    def address(self, engine: int) -> tuple[str, int]:
        """Return the host and port of an engine's control channel.

        Args:
            engine: index of the engine in the producer process.
        """
        return self.listening.addresses[engine]

    def grant(self, engine: int, lease: str) -> bytes:
        """Make an engine grant a lease, and return the ticket (random id) with which to claim the lease.

        Args:
            engine: index of the engine in the producer process.
            lease: name for the new lease.
        """
        self._say(AskTicket(engine, lease))
        return self._answer(Granted, ANSWER_SECONDS).ticket

    def wait_ended(self) -> None:
        """Wait until all leases of all engines in the producer process have ended."""
        self._say(AskEnded())
        self._answer(AllEnded, ANSWER_SECONDS)

    def check(self) -> None:
        """Raise TransferError if the producer process has died."""
        if not self._process.is_alive():
            raise TransferError(self._death())

    def close(self) -> None:
        """Make the producer process end, and wait until it has ended. Kill it if it does not end in time."""
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

    def _answer(self, kind: type[AnswerT], seconds: float) -> AnswerT:
        try:
            if not self._pipe.poll(seconds):
                raise TransferError(f"the producer process gave no answer within {seconds:g} s")
            answer: Any = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise TransferError(self._death()) from error
        if isinstance(answer, ProducerFailed):
            raise TransferError(f"the producer process: {answer.reason}")
        if not isinstance(answer, kind):
            raise TransferError(f"the producer process answered {answer!r}, expected a {kind.__name__}")
        return answer

    def _death(self) -> str:
        self._process.join(_END_SECONDS)
        code = self._process.exitcode
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return f"the producer process (pid {self.pid}) died: {how}"
