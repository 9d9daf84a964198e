"""An engine in a process of its own: start it, call its methods, pause and resume it, end it.

vLLM supports one engine per process, so a benchmark that compares engines runs each in its own.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Protocol, Self

from kvferry.common.errors import KVFerryError, TransferError

_START_SECONDS, _ANSWER_SECONDS, _END_SECONDS = 240.0, 600.0, 30.0


class Closable(Protocol):
    """An engine that can be stopped."""

    def close(self) -> None:
        """Stop the engine."""


class Pausable(Protocol):
    """A process, or a group of processes, that can be paused."""

    def stand_still(self) -> None:
        """Pause it until `go_on`."""

    def go_on(self) -> None:
        """Resume it."""


@contextmanager
def resumed(*paused: Pausable) -> Iterator[None]:
    """Let paused processes run until the ``with`` block ends, and pause them then."""
    for one in paused:
        one.go_on()
    try:
        yield
    finally:
        for one in paused:
            one.stand_still()


class EngineProcess:
    """A handle to the engine's process. Leaving the context manager ends the process."""

    def __init__(self, name: str, make: Callable[[Any], Closable], setup: Any) -> None:
        """Start the process, and return before the engine is ready.

        Args:
            name: name of the engine, used in messages.
            make: function of a module, or class, that the process calls to start the engine.
            setup: argument of `make`.
        """
        self._name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, setup), name=name, daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.go_on()
        self._pipe.close()
        self._process.join(0 if kind else _END_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def wait_ready(self, seconds: float = _START_SECONDS) -> None:
        """Wait until the engine is ready.

        Args:
            seconds: maximum time to wait.

        Raises:
            TransferError: the engine does not start in time.
        """
        self._answer(seconds)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the engine, and return its result.

        Raises:
            TransferError: the call failed, or the process died.
        """
        self._pipe.send((method, arguments))
        return self._answer(_ANSWER_SECONDS)

    def stand_still(self) -> None:
        """Pause all threads of the process until `go_on`, so that it takes no processor time."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Resume a paused process."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, number)

    def _answer(self, seconds: float) -> Any:
        try:
            if not self._pipe.poll(seconds):
                raise TransferError(f"the engine {self._name} gave no answer within {seconds:g} s")
            failure, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise TransferError(f"the engine {self._name} died; see its last lines above") from error
        if failure is not None:
            raise TransferError(f"the engine {self._name}: {failure}")
        return value


def _serve(pipe: Connection, make: Callable[[Any], Closable], setup: Any) -> None:
    """Run the engine until the other end of `pipe` closes. This is the main function of the process."""
    # Ctrl-C reaches the whole process group. The parent ends this process by closing the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # standard output is for the report
    try:
        with closing(make(setup)) as engine:
            pipe.send((None, None))
            while True:
                method, arguments = pipe.recv()
                pipe.send((None, getattr(engine, method)(*arguments)))
    except KVFerryError as error:
        pipe.send((str(error), None))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
