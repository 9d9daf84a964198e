"""An engine that chooses by one policy, in a process of its own: started, asked for replays, ended.

vLLM has room for one engine in a process. Those that wait for their turn are not stepped, and take no
processor. A replay asks for one prompt after another. Before each the engine forgets its own prefixes and
what is in host memory, so that all there is lies in slow tiers; after each everything is stored.
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
from benchmarks.served import Served
from kvferry.errors import KVFerryError, TransferError
from kvferry.observe.events import Event, LoadBegan, LoadEnded, Outcome

FAR = "far "
"""Before the places of every connector but the first, where there are several."""

_ANSWER_TOKENS = 3
_WARMING_TOKENS = 1024
_START_SECONDS = 180.0
_REPLAY_SECONDS = 900.0
_END_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Setup:
    """An engine to start.

    Attributes:
        model: a checkpoint.
        longest: tokens of a request, at most.
        cache_bytes: of its KV cache.
        connector: as of `Served`.
        threads: that compute.
    """

    model: Path
    longest: int
    cache_bytes: int
    connector: dict[str, Any]
    threads: int


@dataclass(frozen=True, slots=True)
class Load:
    """One that was ready.

    Attributes:
        parts: tokens by place.
        seconds: it took.
    """

    parts: dict[str, int]
    seconds: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a request.

    Attributes:
        tokens: of its prompt.
        seconds: until its first token.
        loads: that were ready.
        failed: loads that were not.
    """

    tokens: int
    seconds: float
    loads: tuple[Load, ...]
    failed: int

    @property
    def served(self) -> Counter[str]:
        """Tokens by place."""
        return sum((Counter(load.parts) for load in self.loads), Counter[str]())


@dataclass(frozen=True, slots=True)
class _Replay:
    workload: Workload
    salt: int


@dataclass(frozen=True, slots=True)
class _Trouble:
    reason: str


class PolicyEngine:
    """Our hold on the process; a context manager, after which it is gone.

    Attributes:
        name: for people.
    """

    def __init__(self, name: str, setup: Setup) -> None:
        """Begin to start it: `wait` returns when it is up."""
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, setup), name=f"bench-{name}", daemon=True
        )
        with _environment(OMP_NUM_THREADS=str(setup.threads)):  # read when torch is loaded
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
        """Return when it can be asked.

        Raises:
            TransferError: it does not start, and why.
        """
        self._hear(_START_SECONDS)

    def replay(self, workload: Workload, salt: int) -> tuple[Answer, ...]:
        """Ask for all prompts, made of tokens that are those of this salt.

        Raises:
            TransferError: it died, or one was not answered.
        """
        self._pipe.send(_Replay(workload, salt))
        answers: tuple[Answer, ...] = self._hear(_REPLAY_SECONDS)
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


class Seen:
    """What loads of an engine bring, from the events of its connectors."""

    def __init__(self, halves: Sequence[Any]) -> None:
        """Listen to the scheduler halves of connectors."""
        self._began: dict[tuple[str, str], LoadBegan] = {}
        self._ended, self._failed = list[Load](), 0
        for number, half in enumerate(halves):
            half.watch.add(lambda event, prefix=FAR if number else "": self.hear(event, prefix))

    def hear(self, event: Event, prefix: str = "") -> None:
        """A listener."""
        if isinstance(event, LoadBegan):
            self._began[prefix, event.load] = event
        elif isinstance(event, LoadEnded):
            began = self._began.pop((prefix, event.load))
            if event.outcome is Outcome.READY:
                parts = {prefix + part.place: part.tokens for part in began.parts}
                self._ended.append(Load(parts, event.seconds))
            else:
                self._failed += 1

    def take(self) -> tuple[tuple[Load, ...], int]:
        """Loads that were ready since the last call, and how many were not."""
        found = tuple(self._ended), self._failed
        self._ended, self._failed = [], 0
        return found


@contextmanager
def _environment(**given: str) -> Iterator[None]:
    """Variables that processes inherit which are started meanwhile."""
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
    """Serve until the other end of `pipe` closes; the main function of the process."""
    # Ctrl-C reaches the whole process group; the other process ends this one by closing the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with closing(Served(setup.model, setup.longest, 1, setup.cache_bytes, setup.connector)) as served:
            warming = range(min(_WARMING_TOKENS, setup.longest // 2))
            served.first_token([number % VOCABULARY for number in warming], _ANSWER_TOKENS)
            served.settle()
            seen = Seen(served.halves)
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


def _answer(served: Served, seen: Seen, prompt: list[int]) -> Answer:
    served.forget(host=True)
    seconds = served.first_token(prompt, _ANSWER_TOKENS)
    served.settle()
    loads, failed = seen.take()
    return Answer(len(prompt), seconds, loads, failed)
