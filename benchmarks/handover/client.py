"""An HTTP client that sends several requests at once and times each answer, with one thread."""

from __future__ import annotations

import json
import selectors
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import Any

from kvferry.common.errors import TransferError

_JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer.

    Attributes:
        sent: time at which the client began to send the request, in seconds of `time.perf_counter`.
        answered: time at which the client had the complete answer.
        body: body of the answer.
    """

    sent: float
    answered: float
    body: bytes

    def parsed(self) -> Any:
        """Return the body, which is JSON, as values."""
        return json.loads(self.body)


def post_all(port: int, path: str, bodies: Sequence[bytes], patience_seconds: float) -> list[Answer]:
    """Send POST requests at once to a server of this machine; return the answer to each.

    All connections are new and established before the first request is sent. A kept one may be closed by a
    server that was paused, because its idle time counts while the server is paused.

    Args:
        port: TCP port of the server.
        path: path of the URL.
        bodies: JSON body of each request.
        patience_seconds: longest time until the last answer, in seconds.

    Raises:
        TransferError: the server closed a connection, refused a request, or did not answer in time.
    """
    found: dict[int, Answer] = {}
    try:
        with ExitStack() as stack, selectors.DefaultSelector() as waiting:
            connections = [
                stack.enter_context(closing(HTTPConnection("127.0.0.1", port, timeout=patience_seconds)))
                for _ in bodies
            ]
            for connection in connections:
                connection.connect()
            sent = []
            for number, (connection, body) in enumerate(zip(connections, bodies, strict=True)):
                sent.append(time.perf_counter())
                connection.request("POST", path, body, _JSON)
                waiting.register(connection.sock, selectors.EVENT_READ, number)
            until = time.monotonic() + patience_seconds
            while len(found) < len(bodies):
                ready = waiting.select(until - time.monotonic())
                if not ready:
                    raise TransferError(f"no answer to {path} within {patience_seconds:g} s")
                for key, _ in ready:
                    waiting.unregister(key.fileobj)
                    answer = _read(connections[key.data], path)
                    found[key.data] = Answer(sent[key.data], time.perf_counter(), answer)
    except (OSError, HTTPException) as error:
        why = str(error) or type(error).__name__
        raise TransferError(f"the request to {path} failed: {why}") from error
    return [found[number] for number in range(len(bodies))]


def get(port: int, path: str, patience_seconds: float) -> str:
    """Send a GET request to a server of this machine, and return the body of the answer.

    Args:
        port: TCP port of the server.
        path: path of the URL.
        patience_seconds: longest time until the answer, in seconds.

    Raises:
        TransferError: the server closed the connection, refused the request, or did not answer in time.
    """
    try:
        with closing(HTTPConnection("127.0.0.1", port, timeout=patience_seconds)) as connection:
            connection.request("GET", path)
            return _read(connection, path).decode()
    except (OSError, HTTPException) as error:
        why = str(error) or type(error).__name__
        raise TransferError(f"the request to {path} failed: {why}") from error


def _read(connection: HTTPConnection, path: str) -> bytes:
    response = connection.getresponse()
    body = response.read()
    if response.status != 200:
        said = body[:300].decode(errors="replace")
        raise TransferError(f"the request to {path} was answered with {response.status}: {said}")
    return body
