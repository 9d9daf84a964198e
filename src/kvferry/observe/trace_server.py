"""Serve the traces of recent requests over a Unix socket that only the engine's user can reach.

A separate thread answers one client at a time, each within a deadline. The thread shares Python's interpreter
lock with the engine, so it yields after each piece of work of about 20 µs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any, get_args

import msgspec

import kvferry
from kvferry.common.errors import ConfigError, KVFerryError, ProtocolError
from kvferry.common.threads import Thread
from kvferry.connector.events import EventStream, RequestEvent
from kvferry.observe import socket_directory
from kvferry.observe.traces import RequestTrace, StoredChunks, TraceBuffer

logger = logging.getLogger(__name__)

MAX_QUESTION_BYTES = 4096
MAX_ANSWER_BYTES = 16 << 20
MAX_TRACES = 1000
"""Maximum number of traces in an answer."""
DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Exceptions that decoding an invalid line can raise."""
_SECONDS = 3.0
"""Longest time to read a question and send its answer, in seconds."""
# `struct ucred`: process, user and group.
_CREDENTIALS = struct.Struct("iII")
_ROOT = 0
# The prefix that vLLM adds to a request id: number of the choice (if several) and kind.
_HEAD = r"(?:\d+_)?(?:[a-z]+[-_])*"
_EVENTS = {one.__name__: one for one in get_args(RequestEvent)}


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A request for the traces of requests, which the command `kvferry explain` sends to an engine."""

    # Beginning of the request ids to find, with or without vLLM's prefix; empty for all requests.
    find: str = ""
    most: int = MAX_TRACES


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A description of an engine: the first line of its answer to `kvferry explain`."""

    kvferry: str
    engine_id: str
    model: str
    pid: int
    role: str  # ``prefill``, ``decode`` or ``both``
    # `wall`, `monotonic`: time of the answer in seconds since 1970, and in seconds of the monotonic clock.
    wall: float = 0.0
    monotonic: float = 0.0
    # `remembered`, `most`: number of requests that the engine remembers, and its maximum.
    remembered: int = 0
    most: int = 0
    connector: str = ""  # name of the connector if the engine has several; empty otherwise


class _Trace(msgspec.Struct, frozen=True):
    """The JSON form of a `RequestTrace`. Each event is a pair of its class name and its fields."""

    request_id: str
    events: list[tuple[str, dict[str, Any]]]
    left_out: int
    stored: tuple[StoredChunks, ...]
    heartbeats: int


def trace_to_dict(trace: RequestTrace) -> dict[str, Any]:
    """Return the trace of a request as JSON types."""
    plain: dict[str, Any] = msgspec.to_builtins(_named(trace))
    return plain


def _named(trace: RequestTrace) -> dict[str, Any]:
    return {
        "request_id": trace.request_id,
        # The name tells the reader which class to decode.
        "events": [(type(event).__name__, event) for event in trace.events],
        "left_out": trace.left_out,
        "stored": trace.stored,
        "heartbeats": trace.heartbeats,
    }


def decode_trace(line: bytes) -> RequestTrace:
    """Decode a trace, a line of JSON. Raise ProtocolError if the line is no trace."""
    try:
        plain = msgspec.json.decode(line, type=_Trace)
        told = tuple(msgspec.convert(values, _EVENTS[name]) for name, values in plain.events)
    # A newer engine may send events that this version does not know.
    except (*DECODE_ERRORS, KeyError) as error:
        raise ProtocolError(f"a trace that cannot be read: {error}") from error
    return RequestTrace(plain.request_id, told, plain.left_out, plain.stored, plain.heartbeats)


def matches_id(request_id: str, text: str) -> bool:
    """Return True if an engine's request id begins with a text, with or without the prefix that vLLM adds.

    >>> matches_id("cmpl-5f3a-0-1b2c3d4e", "cmpl-5f3a")  # id of the answer
    True
    >>> matches_id("1_chatcmpl-5f3a-1b2c3d4e", "5f3a")  # X-Request-Id, of an answer with two choices
    True
    >>> matches_id("cmpl-5f3a-0-1b2c3d4e", "1b2c")
    False
    """
    return request_id.startswith(text) or re.match(_HEAD + re.escape(text), request_id) is not None


class TraceServer:
    """A server that sends the traces of requests to clients on a Unix socket. Thread-safe.

    It runs in a thread until `close` is called or the process ends.

    Attributes:
        error: error that prevented the server from listening; None if the server listens.
    """

    def __init__(
        self, traces: TraceBuffer, engine: EngineInfo, max_requests: int, seconds: float = _SECONDS
    ) -> None:
        """Open the socket and start the server's thread. A failure is logged and does not stop the engine."""
        self.error: Exception | None = None
        self._traces, self._engine, self._max_requests, self._seconds = traces, engine, max_requests, seconds
        self._thread = Thread(self._run, "kvferry-explain")
        try:
            directory, name = socket_directory.make_directory(), f"engine-{secrets.token_hex(8)}"
            self._socket, self._path = socket_directory.listen(directory, name)
            self._thread.start()
        except (ConfigError, OSError, RuntimeError) as error:
            # The engine serves without it.
            self.error = error
            logger.warning("kvferry explain cannot ask this engine: %s", error)

    def close(self) -> None:
        """Stop answering clients and remove the socket. Wait at most 0.2 s for the thread to end."""
        if self.error is None:
            with contextlib.suppress(OSError):
                self._path.unlink()
            with contextlib.suppress(OSError):
                # This ends the wait in `accept`.
                self._socket.shutdown(socket.SHUT_RDWR)
            # It may be with a client, for as long as its deadline.
            self._thread.join(0.2)

    def _run(self) -> None:
        with contextlib.suppress(KVFerryError, OSError):
            # Engines that were killed have left theirs.
            socket_directory.remove_stale(self._path.parent)
        with self._socket:
            while True:
                try:
                    connection, _ = self._socket.accept()
                except OSError:
                    return
                with connection:
                    self._handle(connection)

    def _handle(self, connection: socket.socket) -> None:
        try:
            self._serve(connection)
        except OSError:
            pass  # the client has disconnected or is too slow
        except Exception:
            logger.exception("a question of kvferry explain was not answered; tell kvferry's authors")

    def _serve(self, connection: socket.socket) -> None:
        until = time.monotonic() + self._seconds
        try:
            question = _line(connection, until)
            _check_user(connection)
            for line in self._answer(question):
                _limit(connection, until)
                connection.sendall(line + b"\n")
                # Yield the interpreter lock to the engine.
                time.sleep(0)
        except KVFerryError as error:
            _limit(connection, until)
            connection.sendall(msgspec.json.encode({"error": str(error)}) + b"\n")

    def _answer(self, line: bytes) -> Iterator[bytes]:
        """Yield the lines of the answer to a question: the description of the engine, then a line per trace.

        Raises:
            ProtocolError: the line is not a question, or asks for too many traces.
        """
        try:
            question = msgspec.json.decode(line, type=Question)
        except DECODE_ERRORS as error:
            raise ProtocolError(f"a question that cannot be read: {error}") from error
        if not 0 < question.most <= MAX_TRACES:
            raise ProtocolError(f"{question.most} traces are asked for, it must be 1 to {MAX_TRACES}")
        yield msgspec.json.encode(
            msgspec.structs.replace(
                self._engine,
                wall=time.time(),
                monotonic=time.monotonic(),
                remembered=len(self._traces),
                most=self._max_requests,
            )
        )
        found = (trace for trace in self._traces.last() if matches_id(trace.request_id, question.find))
        for trace in islice(found, question.most):
            yield msgspec.json.encode(_named(trace))


def _check_user(connection: socket.socket) -> None:
    """Raise ProtocolError unless a client runs as this process's user or as root."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(found)
    if user not in (_ROOT, os.getuid()):
        raise ProtocolError(f"user {user} asks, only {os.getuid()} may")


def _line(connection: socket.socket, until: float) -> bytes:
    """Receive the first line that a client sends, and return it without the line break.

    Raises:
        ProtocolError: the line exceeds the maximum length of a question.
        OSError: the line did not arrive before `until`, in monotonic seconds.
    """
    received = bytearray()
    while b"\n" not in received:
        _limit(connection, until)
        piece = connection.recv(MAX_QUESTION_BYTES)
        if not piece:
            break
        received += piece
        if len(received) > MAX_QUESTION_BYTES:
            raise ProtocolError(f"a question of more than {MAX_QUESTION_BYTES} bytes")
    return bytes(received).partition(b"\n")[0]


def _limit(connection: socket.socket, until: float) -> None:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    connection.settimeout(left)


class RequestExplainer:
    """Recorder of the events of an engine's latest requests, for the command `kvferry explain`."""

    def __init__(
        self,
        events: EventStream,
        requests: int,
        *,
        engine_id: str,
        model: str,
        role: str,
        connector: str = "",
    ) -> None:
        """Start recording the events of the latest `requests`; 0 to record and serve nothing.

        `start` makes them available to `kvferry explain`.
        """
        self._traces = TraceBuffer(requests) if requests else None
        self._max_requests = requests
        self._server: TraceServer | None = None
        self._engine = EngineInfo(
            kvferry=kvferry.__version__,
            engine_id=engine_id,
            model=model,
            pid=os.getpid(),
            role=role,
            connector=connector,
        )
        if self._traces is not None:
            events.subscribe(self._traces)

    def start(self) -> None:
        """Start the thread that answers. A failure is only logged."""
        if self._traces is not None:
            self._server = TraceServer(self._traces, self._engine, self._max_requests)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
