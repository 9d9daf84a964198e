"""Our hold on the producer's process: started, asked, ended; its death is one sentence."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from kvferry.bench.engines import Engine
from kvferry.bench.producer import AskEnded, AskTicket, Ended, Granted, Listening, Trouble, produce
from kvferry.errors import TransferError
from kvferry.transport.security import random_keys

START_SECONDS = 120.0
ANSWER_SECONDS = 30.0
_END_SECONDS = 15.0

AnswerT = TypeVar("AnswerT")


def use_transports(named: str | None) -> dict[str, str]:
    """Let UCX use these here, if any are named; returns the environment in which a producer does."""
    settings = {} if named is None else {"UCX_TLS": named}
    os.environ.update(settings)
    return settings


class Producer:
    """The other process; a context manager, after which it is gone.

    Attributes:
        listening: where it listens.
        keys: CURVE keys of its channels.
    """

    def __init__(self, engines: Sequence[Engine], settings: Mapping[str, str]) -> None:
        """Start it; returns when it listens.

        Args:
            engines: what it holds.
            settings: environment variables for its transport.

        Raises:
            TransferError: it cannot start, and why.
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
        """Its process id."""
        return self._process.pid or 0

    def address(self, engine: int) -> tuple[str, int]:
        """Where an engine's control channel listens."""
        return self.listening.addresses[engine]

    def grant(self, engine: int, lease: str) -> bytes:
        """Have an engine promise its blocks under that name; return the ticket."""
        self._say(AskTicket(engine, lease))
        return self._answer(Granted, ANSWER_SECONDS).ticket

    def wait_ended(self) -> None:
        """Return when it has heard every acknowledgement: no lease is held."""
        self._say(AskEnded())
        self._answer(Ended, ANSWER_SECONDS)

    def check(self) -> None:
        """Raise TransferError if it has died."""
        if not self._process.is_alive():
            raise TransferError(self._death())

    def close(self) -> None:
        """End it, politely for a while."""
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
        if isinstance(answer, Trouble):
            raise TransferError(f"the producer process: {answer.reason}")
        if not isinstance(answer, kind):
            raise TransferError(f"the producer process answered {answer!r}, expected a {kind.__name__}")
        return answer

    def _death(self) -> str:
        self._process.join(_END_SECONDS)
        code = self._process.exitcode
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return f"the producer process (pid {self.pid}) died: {how}"
