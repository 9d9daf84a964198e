"""An engine with one policy in a separate process: start it, replay workloads, end it.

vLLM supports one engine per process. Engines that are not in use are not stepped, so they use no CPU time. A
replay sends one prompt after another. Before each prompt, the engine clears its prefix cache and host memory,
so that only the storage tiers have chunks. After each prompt, it waits until all chunks are stored.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from benchmarks.checkpoint import VOCABULARY
from benchmarks.choice.workload import Workload
from benchmarks.served import SteppedEngine
from kvferry.common.errors import KVFerryError, TransferError
from kvferry.connector.events import Event, LoadEnded, LoadOutcome

FAR = "far "
"""Prefix of the names of places in all connectors but the first, if there are several."""

_ANSWER_TOKENS = 3
_WARMING_TOKENS = 1024
_START_SECONDS = 180.0
_REPLAY_SECONDS = 900.0
_END_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Setup:
    """The configuration of an engine.

    Attributes:
        model: folder of the checkpoint.
        longest: length of the longest request, in tokens.
        cache_bytes: size of the KV cache, in bytes.
        connector: transfer configuration, same as for `SteppedEngine`.
        threads: number of computing threads.
    """

    model: Path
    longest: int
    cache_bytes: int
    connector: dict[str, Any]
    threads: int


@dataclass(frozen=True, slots=True)
class CompletedLoad:
    """A successful load.

    Attributes:
        parts: number of loaded tokens by place.
        seconds: duration in seconds.
    """

    parts: dict[str, int]
    seconds: float


@dataclass(frozen=True, slots=True)
class ReplayAnswer:
    """The results of one request.

    Attributes:
        tokens: length of the prompt, in tokens.
        seconds: time to first token, in seconds.
        loads: successful loads.
        failed: number of failed loads.
    """

    tokens: int
    seconds: float
    loads: tuple[CompletedLoad, ...]
    failed: int

    @property
    def served(self) -> Counter[str]:
        """Return the number of loaded tokens by place."""
        return sum((Counter(load.parts) for load in self.loads), Counter[str]())


@dataclass(frozen=True, slots=True)
class _Replay:
    workload: Workload
    salt: int


@dataclass(frozen=True, slots=True)
class _Trouble:
    reason: str


class PolicyEngine:
    """A handle to the engine's process. Leaving the context manager ends the process.

    Attributes:
        name: name of the policy, used in messages.
    """

    def __init__(self, name: str, setup: Setup) -> None:
        """Start the process, and return before the engine is ready."""
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, setup), name=f"bench-{name}", daemon=True
        )
        with _environment(OMP_NUM_THREADS=str(setup.threads)):  # torch reads it when it is loaded
            self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pipe.close()
        self._process.join(0 if kind else _END_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def wait(self) -> None:
        """Wait until the engine is ready.

        Raises:
            TransferError: the engine does not start.
        """
        self._hear(_START_SECONDS)

    def replay(self, workload: Workload, salt: int) -> tuple[ReplayAnswer, ...]:
        """Send all prompts of a workload, and return the results of the requests.

        Args:
            workload: prompts to send.
            salt: number that determines the token ids of the blocks.

        Raises:
            TransferError: the process died, or a request was not answered.
        """
        self._pipe.send(_Replay(workload, salt))
        answers: tuple[ReplayAnswer, ...] = self._hear(_REPLAY_SECONDS)
        return answers

    def _hear(self, seconds: float) -> Any:
        try:
            if not self._pipe.poll(seconds):
                raise TransferError(f"the engine of policy {self.name} gave no answer within {seconds:g} s")
            heard = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join(_END_SECONDS)
            code = self._process.exitcode
            raise TransferError(
                f"the engine of policy {self.name} died with exit code {code}; what it said last stands above"
            ) from error
        if isinstance(heard, _Trouble):
            raise TransferError(f"the engine of policy {self.name}: {heard.reason}")
        return heard


class LoadListener:
    """Event listener that collects the loads of an engine's connectors."""

    def __init__(self, halves: Sequence[Any]) -> None:
        """Subscribe to the events of connectors.

        Args:
            halves: scheduler-side objects of the engine's connectors.
        """
        self._ended, self._failed = list[CompletedLoad](), 0
        for number, half in enumerate(halves):
            half.events.subscribe(lambda event, prefix=FAR if number else "": self.hear(event, prefix))

    def hear(self, event: Event, prefix: str = "") -> None:
        """Record the end of a load.

        Args:
            event: event of a connector.
            prefix: prefix for the names of the connector's places.
        """
        if isinstance(event, LoadEnded):
            if event.outcome is LoadOutcome.READY:
                parts = {prefix + part.place: part.tokens for part in event.began.parts}
                self._ended.append(CompletedLoad(parts, event.seconds))
            else:
                self._failed += 1

    def take(self) -> tuple[tuple[CompletedLoad, ...], int]:
        """Return the successful loads and the number of failed ones since the last call, and clear them."""
        found = tuple(self._ended), self._failed
        self._ended, self._failed = [], 0
        return found


@contextmanager
def _environment(**given: str) -> Iterator[None]:
    """Set environment variables while the block runs, for processes that are started in it."""
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(pipe: Connection, setup: Setup) -> None:
    """Run the engine until the other end of `pipe` closes. This is the main function of the process."""
    # Ignore Ctrl-C, which reaches the whole process group. The parent ends this process by closing the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        engine = SteppedEngine(setup.model, setup.longest, 1, setup.cache_bytes, setup.connector)
        with closing(engine) as served:
            warming = range(min(_WARMING_TOKENS, setup.longest // 2))
            served.first_token([number % VOCABULARY for number in warming], _ANSWER_TOKENS)
            served.settle()
            seen = LoadListener(served.halves)
            pipe.send(None)
            while True:
                asked: _Replay = pipe.recv()
                pipe.send(tuple(_answer(served, seen, p) for p in _prompts(asked)))
    except KVFerryError as error:
        pipe.send(_Trouble(str(error)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass


def _prompts(asked: _Replay) -> list[list[int]]:
    return list(asked.workload.token_ids(VOCABULARY, asked.salt))


def _answer(served: SteppedEngine, seen: LoadListener, prompt: list[int]) -> ReplayAnswer:
    served.forget(host=True)
    seconds = served.first_token(prompt, _ANSWER_TOKENS)
    served.settle()
    loads, failed = seen.take()
    return ReplayAnswer(len(prompt), seconds, loads, failed)
