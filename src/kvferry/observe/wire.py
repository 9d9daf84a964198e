"""Encode the messages between `kvferry explain` and an engine as lines of JSON.

A connection carries one `Question` and its answer. The answer is a line with `EngineInfo`, then one line per
trace (`encode_trace`), the latest request first.
"""

from __future__ import annotations

from typing import Any, get_args

import msgspec

from kvferry.connector.events import RequestEvent
from kvferry.errors import ProtocolError
from kvferry.observe.traces import RequestTrace, StoredChunks

MAX_QUESTION_BYTES = 4096
MAX_ANSWER_BYTES = 16 << 20
MAX_TRACES = 1000
"""Maximum number of traces in an answer."""
DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Exceptions that decoding an invalid line can raise."""
_EVENTS = {one.__name__: one for one in get_args(RequestEvent)}


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A request for the traces of requests, which the command `kvferry explain` sends to an engine.

    Attributes:
        find: beginning of the request ids to find, with or without vLLM's prefix; empty for all requests.
        most: maximum number of traces in the answer.
    """

    find: str = ""
    most: int = MAX_TRACES


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A description of an engine: the first line of its answer to `kvferry explain`.

    Attributes:
        kvferry: version of kvferry.
        pid: process id of the engine.
        role: ``prefill``, ``decode`` or ``both``.
        wall, monotonic: time of the answer in seconds since 1970, and in seconds of the monotonic clock.
        remembered: number of requests that the engine remembers.
        most: maximum number of requests that the engine remembers.
        connector: name of the connector if the engine has several; empty otherwise.
    """

    kvferry: str
    engine_id: str
    model: str
    pid: int
    role: str
    wall: float = 0.0
    monotonic: float = 0.0
    remembered: int = 0
    most: int = 0
    connector: str = ""


class _Trace(msgspec.Struct, frozen=True):
    """The JSON form of a `RequestTrace`. Each event is a pair of its class name and its fields."""

    request_id: str
    events: list[tuple[str, dict[str, Any]]]
    left_out: int
    stored: tuple[StoredChunks, ...]
    heartbeats: int


def encode_trace(trace: RequestTrace) -> bytes:
    """Return the trace of a request as one line of JSON."""
    return msgspec.json.encode(_named(trace))


def trace_to_dict(trace: RequestTrace) -> dict[str, Any]:
    """Return the trace of a request as a JSON-serializable dict."""
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
    """Decode a line of `encode_trace`.

    Raises:
        ProtocolError: the line is not a trace.
    """
    try:
        plain = msgspec.json.decode(line, type=_Trace)
        told = tuple(msgspec.convert(values, _EVENTS[name]) for name, values in plain.events)
    # A newer engine may send events that this version does not know.
    except (*DECODE_ERRORS, KeyError) as error:
        raise ProtocolError(f"a trace that cannot be read: {error}") from error
    return RequestTrace(plain.request_id, told, plain.left_out, plain.stored, plain.heartbeats)


def read_question(line: bytes) -> Question:
    """Decode and check a client's question, a line of JSON.

    Raises:
        ProtocolError: the line is not a question, or asks for too many traces.
    """
    try:
        question = msgspec.json.decode(line, type=Question)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"a question that cannot be read: {error}") from error
    if not 0 < question.most <= MAX_TRACES:
        raise ProtocolError(f"{question.most} traces are asked for, it must be 1 to {MAX_TRACES}")
    return question
