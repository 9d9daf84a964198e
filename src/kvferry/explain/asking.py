"""Asks the engines of this machine for traces, all at once; those that do not answer cost a few seconds."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvferry.errors import ConfigError, ProtocolError
from kvferry.observe import socket_directory
from kvferry.observe.events import Arrived
from kvferry.observe.traces import RequestTrace
from kvferry.observe.wire import DECODE_ERRORS, MAX_ANSWER_BYTES, EngineInfo, Question, decode_trace

_SECONDS = 5.0
"""For all engines together."""
_SHORTEST = 0.001
_MOST_AT_ONCE = 64


class _Refusal(msgspec.Struct, frozen=True):
    error: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine has said.

    Attributes:
        engine: which.
        traces: the latest first.
    """

    engine: EngineInfo
    traces: tuple[RequestTrace, ...]

    def wall(self, at: float) -> float:
        """Seconds since 1970 at a time of the engine's monotonic clock."""
        return at - self.engine.monotonic + self.engine.wall


@dataclass(frozen=True, slots=True)
class Told:
    """A trace, and whose it is."""

    answer: Answer
    trace: RequestTrace

    @property
    def came(self) -> float:
        """When the request came to its engine, seconds since 1970."""
        return self.answer.wall(self.trace.events[0].at)


@dataclass(frozen=True, slots=True)
class Answers:
    """Of all engines.

    Attributes:
        answers: of those that gave one.
        silent: what else there is to say: of those that gave none, and of where nobody could be asked.
    """

    answers: tuple[Answer, ...]
    silent: tuple[str, ...]

    def told(self) -> list[Told]:
        """All traces, in the order in which the requests came: the prefill engine's first."""
        found = [Told(answer, trace) for answer in self.answers for trace in answer.traces]
        return sorted(found, key=lambda one: one.came)


def ask(question: Question) -> Answers:
    """Ask every engine of this user on this machine.

    Raises:
        ConfigError: no engine answers, and a directory of sockets is not the user's alone.
    """
    paths: list[Path] = []
    refused: list[ConfigError] = []
    for directory in socket_directory.socket_directories():
        try:
            paths += socket_directory.engine_sockets(directory)
        except ConfigError as error:
            refused.append(error)
    until = time.monotonic() + _SECONDS
    asked = msgspec.json.encode(question) + b"\n"
    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        lines = list(pool.map(lambda path: _asked(path, asked, until), paths))
    # In one thread: msgspec crashes where two are the first to read a type.
    said = [_read(each) if isinstance(each, list) else each for each in lines]
    answers = tuple(one for one in said if isinstance(one, Answer))
    if refused and not answers:
        raise refused[0]
    return Answers(answers, (*(one for one in said if isinstance(one, str)), *map(str, refused)))


def _asked(path: Path, question: bytes, until: float) -> list[bytes] | str | None:
    """The lines that one engine says, or why it does not; None if it is gone."""
    try:
        connection = socket_directory.connect(path, until)
        if connection is None:
            return None
        with connection:
            connection.settimeout(max(_SHORTEST, until - time.monotonic()))
            connection.sendall(question)
            return list(_lines(connection, until))
    except (OSError, ProtocolError) as error:
        return _no_answer(error)


def _no_answer(error: Exception) -> str:
    return f"an engine did not answer: {type(error).__name__}: {error}"


def _read(lines: list[bytes]) -> Answer | str:
    """What one engine says, or why that is no answer."""
    try:
        return _answer(*lines)
    except ProtocolError as error:
        return _no_answer(error)


def _answer(first: bytes, *rest: bytes) -> Answer:
    """What one engine says, by lines.

    Raises:
        ProtocolError: it cannot be understood, or is an engine's refusal.
    """
    try:
        if b'"error"' in first[:16]:
            raise ProtocolError(msgspec.json.decode(first, type=_Refusal).error)
        engine = msgspec.json.decode(first, type=EngineInfo)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"its answer cannot be read: {error}") from error
    traces = tuple(decode_trace(line) for line in rest)
    if not all(trace.events and isinstance(trace.events[0], Arrived) for trace in traces):
        raise ProtocolError("a trace that does not begin with the arrival of its request")
    return Answer(engine, traces)


def _lines(asked: socket.socket, until: float) -> Iterator[bytes]:
    """All lines until it says no more; at least one."""
    said = bytearray()
    while True:
        asked.settimeout(max(_SHORTEST, until - time.monotonic()))
        piece = asked.recv(1 << 16)
        if not piece:
            break
        said += piece
        if len(said) > MAX_ANSWER_BYTES or time.monotonic() > until:
            raise ProtocolError(
                f"its answer is larger than {MAX_ANSWER_BYTES} bytes, or takes longer than {_SECONDS:g} s"
            )
    if not said.endswith(b"\n"):
        raise ProtocolError("its answer was cut short")
    yield from bytes(said).splitlines()
