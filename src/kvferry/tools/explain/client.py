"""Client that asks all engines of this machine for the traces of requests, within one deadline."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvferry.common.errors import ConfigError, ProtocolError
from kvferry.connector import Arrived
from kvferry.observe import (
    DECODE_ERRORS,
    MAX_ANSWER_BYTES,
    EngineInfo,
    Question,
    RequestTrace,
    connect,
    decode_trace,
    engine_sockets,
    socket_directories,
)

# Within this time all engines together must have answered.
SECONDS = 5.0
# A timeout of 0 would make the socket non-blocking.
_SHORTEST = 0.001
# Threads that mostly wait. One silent engine must not use up the time of the others.
_MOST_AT_ONCE = 64


class _Refusal(msgspec.Struct, frozen=True):
    error: str


@dataclass(frozen=True, slots=True)
class EngineTrace:
    """The trace of a request, and the engine that sent it."""

    engine: EngineInfo
    trace: RequestTrace

    @property
    def arrived(self) -> float:
        """Time at which the request reached its engine, in seconds since 1970."""
        return self.trace.events[0].at - self.engine.monotonic + self.engine.wall


@dataclass(frozen=True, slots=True)
class AllAnswers:
    """The answers of all engines.

    Attributes:
        traces: of all their requests, sorted by the arrival time of the request at its engine.
        problems: error messages, one for each engine without a valid answer, and one for each directory of
            sockets that is unreadable or not private to this user.
    """

    engines: tuple[EngineInfo, ...]
    traces: tuple[EngineTrace, ...]
    problems: tuple[str, ...]


def ask_engines(question: Question, seconds: float = SECONDS) -> AllAnswers:
    """Ask every engine that this user runs on this machine for traces, and return the answers.

    Raises:
        ConfigError: no engine answered, and a directory that may have engines' sockets cannot be used, for
            example because other users may enter it.
    """
    paths: list[Path] = []
    refused: list[ConfigError] = []
    for directory in socket_directories():
        try:
            paths += engine_sockets(directory)
        except ConfigError as error:
            refused.append(error)
    until = time.monotonic() + seconds
    encoded = msgspec.json.encode(question) + b"\n"
    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        replies = list(pool.map(lambda path: _ask(path, encoded, until), paths))
    engines, traces, problems = list[EngineInfo](), list[EngineTrace](), list[str]()
    # In one thread, because msgspec crashes if two threads decode a type for the first time.
    for lines in replies:
        try:
            if isinstance(lines, Exception):
                raise lines
            if lines:
                engine, found = _decode(*lines)
                engines.append(engine)
                traces += [EngineTrace(engine, trace) for trace in found]
        except (OSError, ProtocolError) as error:
            problems.append(f"an engine did not answer: {type(error).__name__}: {error}")
    if refused and not engines:
        # With an answer it is only a problem: other users' directories may stand beside ours.
        raise refused[0]
    traces.sort(key=lambda one: one.arrived)
    return AllAnswers(tuple(engines), tuple(traces), (*problems, *map(str, refused)))


def _ask(path: Path, question: bytes, until: float) -> list[bytes] | Exception:
    """Send a question to an engine until so many monotonic seconds, and return the lines of its answer.

    Return the error if the engine does not answer, and no line if it has ended.
    """
    try:
        connection = connect(path, until)
        if connection is None:
            return []
        with connection:
            connection.settimeout(max(_SHORTEST, until - time.monotonic()))
            connection.sendall(question)
            return list(_lines(connection, until))
    except (OSError, ProtocolError) as error:
        return error


def _decode(first: bytes, *rest: bytes) -> tuple[EngineInfo, list[RequestTrace]]:
    """Decode an engine's description and traces. Raise ProtocolError if malformed, or if it refused."""
    try:
        # A refusal has no other field, so its line begins with this name.
        if b'"error"' in first[:16]:
            raise ProtocolError(msgspec.json.decode(first, type=_Refusal).error)
        engine = msgspec.json.decode(first, type=EngineInfo)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"its answer cannot be read: {error}") from error
    traces = [decode_trace(line) for line in rest]
    if not all(trace.events and isinstance(trace.events[0], Arrived) for trace in traces):
        raise ProtocolError("a trace that does not begin with the arrival of its request")
    return engine, traces


def _lines(connection: socket.socket, until: float) -> Iterator[bytes]:
    """Receive an engine's answer until the engine closes the connection, and yield the answer's lines.

    Raises:
        ProtocolError: the answer is too large, takes too long, or ends within a line.
    """
    received = bytearray()
    while True:
        connection.settimeout(max(_SHORTEST, until - time.monotonic()))
        piece = connection.recv(1 << 16)
        if not piece:
            break
        received += piece
        if len(received) > MAX_ANSWER_BYTES or time.monotonic() > until:
            raise ProtocolError(f"its answer is larger than {MAX_ANSWER_BYTES} bytes, or takes too long")
    # An engine closes the connection after a whole line, unless it dies.
    if not received.endswith(b"\n"):
        raise ProtocolError("its answer was cut short")
    yield from bytes(received).splitlines()
