"""Handle one HTTP request; cancel it if the client disconnects or the router stops."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import anyio
from starlette.types import Message, Receive, Scope, Send

from kvferry.tools.serving.router.metrics import RequestRecord, RouterMetrics
from kvferry.tools.serving.router.replies import ApiError, Headers
from kvferry.tools.serving.router.upstream import LOOP, Hop, relayed

_REQUEST_ID = b"x-request-id"
# Ids end up in logs, metrics and answers of every engine, so a client's may not hold anything else.
_PLAIN_ID = re.compile(rb"[A-Za-z0-9._:/@=~+-]{1,128}")
# The next request of this client may reach another router.
_TRY_ELSEWHERE = ((b"connection", b"close"), (b"retry-after", b"1"))
_DRAINING = ApiError(
    503, "the router is being stopped, and takes no new requests", "router_draining", _TRY_ELSEWHERE
)
_STOPPED = ApiError(503, "the router is being stopped", "router_stopped")


@dataclass(frozen=True, slots=True)
class Call:
    """An HTTP request of a client, with its complete body.

    Attributes:
        query: query of the URL, encoded, without the question mark.
        headers: headers of the request to the engine: those of the client, with x-request-id, and with this
            router's entry added to Via.
        reply_headers: headers to add to the answer for the client: only x-request-id.
        record: facts about the request for the metrics, which the handler adds to.
    """

    method: str
    path: str
    query: str
    headers: Headers
    reply_headers: Headers
    body: bytes
    record: RequestRecord

    def target(self, path: str) -> str:
        return f"{path}?{self.query}" if self.query else path


class ActiveRequests:
    """The requests that are under way.

    Attributes:
        draining: True once new requests are refused, because the router is about to stop.
        ending: True once `end` was called, so that a cancelled request can tell why it was cancelled.
    """

    def __init__(self) -> None:
        self.draining = False
        self.ending = False
        self._scopes: set[anyio.CancelScope] = set()
        self._none = asyncio.Event()
        self._none.set()

    def __len__(self) -> int:
        return len(self._scopes)

    @contextmanager
    def counted(self) -> Iterator[anyio.CancelScope]:
        """Count a request as under way in the ``with`` block, which the yielded scope can cancel."""
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            self._none.clear()
            try:
                yield scope
            finally:
                self._scopes.discard(scope)
                if not self._scopes:
                    self._none.set()

    async def wait_ended(self) -> None:
        await self._none.wait()

    def end(self) -> None:
        """Cancel all requests under way. `RouterEndpoint` then sends an error to each client."""
        self.ending = True
        for scope in self._scopes:
            scope.cancel()


class RouterEndpoint:
    """An ASGI application that answers a whole request by a handler, cancelled if the client disconnects."""

    def __init__(
        self,
        handler: Callable[[Call, Send], Awaitable[None]],
        ongoing: ActiveRequests,
        hop: Hop,
        max_body_bytes: int,
        metrics: RouterMetrics,
    ) -> None:
        self._handler = handler
        self._metrics = metrics
        self._ongoing, self._hop = ongoing, hop
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request.

        The client gets an error if the request has already passed through this router, if its body is too
        large, or if the router stops before the answer is complete.
        """
        record = RequestRecord()
        self._metrics.begin()
        try:
            await self._serve(scope, receive, _Answer(send, record), record)
        finally:
            self._metrics.end(record)

    async def _serve(self, scope: Scope, receive: Receive, answer: _Answer, record: RequestRecord) -> None:
        path = scope["path"]
        reply_headers = ((_REQUEST_ID, _request_id(scope)),)
        if self._hop.has_seen(scope["headers"]):
            await LOOP.reply(path).send(answer.send, reply_headers)
            return
        if self._ongoing.draining:
            await _DRAINING.reply(path).send(answer.send, reply_headers)
            return
        with self._ongoing.counted() as request:
            # Counted first, so that a router that stops need not wait for a slow upload.
            body = await _read_body(receive, self._max_body_bytes)
            if body is None:
                return
            if len(body) > self._max_body_bytes:
                limit = f"the request body is larger than the {self._max_body_bytes} bytes that are allowed"
                await ApiError(413, limit, "request_too_large").reply(path).send(answer.send, reply_headers)
            else:
                record.received_bytes = len(body)
                headers = self._hop.passed_on(relayed(scope["headers"]) + reply_headers)
                query = scope.get("query_string", b"").decode("latin-1")
                call = Call(scope["method"], path, query, headers, reply_headers, body, record)
                # The server tells that a client has left only to whoever calls `receive`, and the handler
                # never does.
                watching = asyncio.create_task(_cancel_on_disconnect(receive, request))
                try:
                    await self._handler(call, answer.send)
                finally:
                    watching.cancel()
        if self._ongoing.ending:
            await answer.cut_short(reply_headers, path)


def _request_id(scope: Scope) -> bytes:
    """Return the client's x-request-id, or a new id if it is missing, too long, or has other characters."""
    given = dict(scope["headers"]).get(_REQUEST_ID, b"")
    return given if _PLAIN_ID.fullmatch(given) else uuid.uuid4().hex.encode()


async def _read_body(receive: Receive, max_bytes: int) -> bytes | None:
    """Return a body, or a part of more than `max_bytes`; None if the client disconnects."""
    body = bytearray()
    while len(body) <= max_bytes:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if not message.get("more_body", False):
            break
    return bytes(body)


async def _cancel_on_disconnect(receive: Receive, request: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    request.cancel()


class _Answer:
    """A wrapper of an ASGI `send` function that records what was sent."""

    def __init__(self, send: Send, record: RequestRecord) -> None:
        self._send = send
        self._record = record

    async def send(self, message: Message) -> None:
        await self._send(message)
        record = self._record
        if message["type"] == "http.response.start":
            record.status = message["status"]
        elif message["type"] == "http.response.body":
            record.first_byte = record.first_byte or time.monotonic()
            record.sent_bytes += len(message.get("body", b""))
            record.complete = not message.get("more_body", False)

    async def cut_short(self, reply_headers: Headers, path: str) -> None:
        """End an answer that is not complete yet, because the router stops."""
        # An answer that has begun has its status already. So its stream ends with an error event.
        if self._record.status is None:
            await _STOPPED.reply(path).send(self.send, reply_headers)
        elif not self._record.complete:
            self._record.broken = True
            await self.send({"type": "http.response.body", "body": _STOPPED.event(path)})
