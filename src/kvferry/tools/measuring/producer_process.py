"""A handle to the producer, the process that is read from: start it, send requests to it, end it."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from kvferry.common.errors import TransferError
from kvferry.tools.measuring.producer_main import (
    AllEnded,
    AskTicket,
    Granted,
    Listening,
    ProducerFailed,
    produce,
)
from kvferry.tools.measuring.simulated import SimulatedEngine
from kvferry.transport.security import random_keys

START_SECONDS = 120.0
ANSWER_SECONDS = 30.0
_END_SECONDS = 15.0
MOVE_SECONDS = 60.0
_CHECK_SECONDS = 0.2

AnswerT = TypeVar("AnswerT")


def use_transports(transports: str | None) -> dict[str, str]:
    """Set UCX_TLS in this process, unless it is None, and return the variables for a second process."""
    settings = {} if transports is None else {"UCX_TLS": transports}
    os.environ.update(settings)
    return settings


class ProducerProcess:
    """A handle to the producer, a process that runs the engines to read from.

    Leaving its context ends the process. If the process has died, every method that needs it raises
    TransferError with the reason.

    Attributes:
        listening: addresses of the engines' control channels, and the incarnation.
        keys: CURVE keys of the engines' channels.
    """

    def __init__(self, engines: Sequence[SimulatedEngine], settings: Mapping[str, str]) -> None:
        """Start the process, and wait until its engines can be read from.

        Args:
            settings: environment variables to set in the process, such as UCX_TLS.

        Raises:
            TransferError: the process cannot start.
        """
        # A forked process would have NIXL's and ZeroMQ's sockets and locks, without their threads.
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
        # Else this process would keep the pipe of a dead producer open, and wait for its answer.
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
        return self._process.pid or 0

    def address(self, engine: int) -> tuple[str, int]:
        """Return the host and port of an engine's control channel."""
        return self.listening.addresses[engine]

    def grant(self, engine: int, lease: str) -> bytes:
        """Make an engine grant a lease of this name, and return the ticket."""
        self._say(AskTicket(engine, lease))
        return self._answer(Granted, ANSWER_SECONDS).ticket

    def wait_ended(self) -> None:
        """Wait until all leases of all engines have ended."""
        self._say(AllEnded())
        self._answer(AllEnded, ANSWER_SECONDS)

    def check(self) -> None:
        if not self._process.is_alive():
            raise TransferError(self._death())

    def close(self) -> None:
        """Make the producer process end, wait until it has, and kill it if it does not in time."""
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

    def _answer(self, kind: type[AnswerT], seconds: float) -> AnswerT:
        try:
            # A producer that hangs is reported, and not waited for.
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


class WaitLimit:
    """A limit of `MOVE_SECONDS` and a health check for a loop that polls another process.

    Args:
        check: function that raises TransferError if the other process has died.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        now = time.monotonic()
        self._end, self._next = now + MOVE_SECONDS, now + _CHECK_SECONDS

    def check(self) -> None:
        """Check that the other process lives and that the time limit has not passed.

        Raises:
            TransferError: it does not, or it has.
        """
        now = time.monotonic()
        # Cheap enough for every iteration of a loop that measures microseconds.
        if now < self._next:
            return
        self._next = now + _CHECK_SECONDS
        self._check()
        if now > self._end:
            raise TransferError(f"a transfer was not done after {MOVE_SECONDS:g} s")
