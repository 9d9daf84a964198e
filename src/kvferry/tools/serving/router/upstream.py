"""Send HTTP requests to engines."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from io import BytesIO
from typing import Self

import aiohttp
import yarl

from kvferry.tools.serving.router.backends import Backend, SilentEngine, Waits
from kvferry.tools.serving.router.replies import ApiError, Headers, Reply
from kvferry.tools.serving.router.settings import RouterSettings

# RFC 5842.
LOOP_DETECTED = 508
# Why an engine is down that answers with `LOOP_DETECTED`.
LOOP_REASON = "it is this router itself, or a router that asks it"
_VIA = b"via"


class Hop:
    """The entry that a router adds to the Via header of each request to an engine: its random name."""

    def __init__(self) -> None:
        self._name = f"kvferry-{secrets.token_hex(8)}".encode()

    def passed_on(self, headers: Headers = ()) -> Headers:
        """Return `headers` with this router's entry added to Via. Names are in lower case."""
        before = [value for name, value in headers if name == _VIA]
        others = [(name, value) for name, value in headers if name != _VIA]
        return (*others, (_VIA, b", ".join([*before, b"1.1 " + self._name])))

    def has_seen(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Return whether a request with these headers was already forwarded by this router."""
        return any(name == _VIA and self._name in value for name, value in headers)


LOOP = ApiError(
    LOOP_DETECTED,
    "this request has come through this router before: one of its engines is the router itself, or a "
    "router that asks it; correct --prefill and --decode",
    "router_loop",
)


# The engine has not received the request, so it may be sent to another one at no risk.
NOT_CONNECTED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)

# No answer arrived, or only a part of it. Includes `NOT_CONNECTED`.
BROKEN = (aiohttp.ClientError, SilentEngine)


class BrokenStream(Exception):
    """Raised if an engine's stream ends before its last event. The message says why."""


# Time after which the kernel gives up a machine that does not acknowledge anything, or a server that reads
# nothing of a body that does not fit into its buffers.
_SILENT_SECONDS = 60

_OWN_FAULTS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL)

_MAX_HEADER_BYTES = 64 << 10
# aiohttp warns about larger bodies that are bytes.
_MAX_PLAIN_BYTES = 1 << 20

# Headers that apply to one connection only, or that every sender sets itself.
_NOT_RELAYED = frozenset(
    (
        b"accept-encoding",
        b"connection",
        b"content-length",
        b"date",
        b"expect",
        b"host",
        b"keep-alive",
        b"origin",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"server",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"x-request-id",
    )
)

# The router answers browsers by its own --allowed-origins, whatever engines allow.
_CORS = b"access-control-"


def relayed(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the headers that the router forwards, with their names in lower case."""
    all_headers = [(name.lower(), value) for name, value in headers]
    # Headers that Connection names apply to one connection only (RFC 9110, section 7.6.1).
    named = b",".join(value for name, value in all_headers if name == b"connection").lower().split(b",")
    left_out = _NOT_RELAYED.union(name.strip() for name in named)
    return tuple(
        (name, value) for name, value in all_headers if name not in left_out and not name.startswith(_CORS)
    )


class EngineAnswer:
    """An engine's HTTP answer, whose body is not read yet. Its headers are as the engine sent them."""

    def __init__(self, response: aiohttp.ClientResponse, waits: Waits) -> None:
        self.status = response.status
        self.headers: Headers = response.raw_headers
        self._content, self._waits = response.content, waits

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body in pieces, each as soon as it has arrived.

        Raises:
            aiohttp.ClientError: the connection broke.
            SilentEngine: the engine is silent.
        """
        while True:
            async with self._waits.wait():
                chunk = await self._content.readany()
            if not chunk:
                return
            yield chunk


class EngineClient:
    """HTTP client with which the router sends requests to all engines. Use it as an async context manager."""

    def __init__(self, settings: RouterSettings, hop: Hop) -> None:
        self._settings = settings
        self._via = hop.passed_on()
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                # No limit of connections: requests queue in the engines, which schedule them, not here.
                limit=0,
                keepalive_timeout=self._settings.keep_connection_seconds,
                socket_factory=watched_socket,
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._settings.silent_seconds),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            # The engine gets the client's headers, and none of aiohttp's own.
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            max_line_size=_MAX_HEADER_BYTES,
            max_field_size=_MAX_HEADER_BYTES,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    @asynccontextmanager
    async def opened(
        self, method: str, backend: Backend, path: str, headers: Headers = (), body: bytes = b""
    ) -> AsyncIterator[EngineAnswer]:
        """Send a request, and yield the answer before its body is read.

        Args:
            headers: headers of the request; those of `Hop` if there are none.

        Raises:
            aiohttp.ClientError: no answer arrived.
            SilentEngine: the engine is silent.
        """
        sent = [(name.decode(), value.decode("utf-8", "replace")) for name, value in headers or self._via]
        # Ask for an uncompressed answer, because its bytes are relayed unchanged.
        sent.append(("accept-encoding", "identity"))
        data = None if not body else body if len(body) <= _MAX_PLAIN_BYTES else BytesIO(body)
        async with backend.waits.wait():
            response = await self._session.request(
                method,
                yarl.URL(backend.url + path, encoded=True),
                headers=sent,
                data=data,
                allow_redirects=False,
            )
        try:
            yield EngineAnswer(response, backend.waits)
        finally:
            # Closes the connection of an answer that is not complete, and the engine then aborts the request.
            response.close()


def watched_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket whose connection breaks if the other machine acknowledges nothing for a minute."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    # Else a request to a machine that has lost its power would wait for good.
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _SILENT_SECONDS),
        ("TCP_KEEPINTVL", _SILENT_SECONDS // 3),
        ("TCP_USER_TIMEOUT", _SILENT_SECONDS * 1000),
    ):
        if hasattr(socket, name):  # not every operating system has all of them
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


async def read_whole(answer: EngineAnswer) -> Reply:
    """Read the rest of an engine's answer, and return the complete answer.

    Raises:
        aiohttp.ClientError: the connection broke.
        SilentEngine: the engine is silent.
    """
    body = b"".join([chunk async for chunk in answer.chunks()])
    return Reply(answer.status, relayed(answer.headers), body)


def note_unreachable(backend: Backend, error: BaseException) -> None:
    """Mark an engine as down after a transport error, unless the fault is the router's own."""
    # The engine may be well if it was the router that lacked a descriptor or a port.
    if not is_own_fault(error):
        backend.mark_down(describe_error(error))


def is_own_fault(error: BaseException) -> bool:
    """Return whether the router itself lacks a descriptor or a port."""
    return getattr(error, "errno", None) in _OWN_FAULTS


# Subclasses stand before their bases, because the first match counts.
_DESCRIPTIONS: tuple[tuple[type[BaseException], str], ...] = (
    (BrokenStream, "{error}"),
    (SilentEngine, "it answers nothing, not even /health"),
    (aiohttp.ConnectionTimeoutError, "it does not answer when the router connects"),
    (aiohttp.ClientConnectorDNSError, "its host name cannot be resolved"),
    (aiohttp.ClientSSLError, "the router cannot connect to it over https: {cause}"),
    (aiohttp.ClientConnectorError, "the router cannot connect to it: {cause}"),
    (aiohttp.ServerDisconnectedError, "it closed the connection without an answer"),
    (aiohttp.ClientPayloadError, "it closed the connection in the middle of its answer"),
    (aiohttp.ClientResponseError, "its answer is not HTTP/1.1"),
    (BaseException, "the connection to it broke: {cause}"),
)


def describe_error(error: BaseException) -> str:
    """Return a transport error as a sentence about the engine."""
    text = next(text for kind, text in _DESCRIPTIONS if isinstance(error, kind))
    cause = getattr(error, "os_error", error)
    if isinstance(cause, ssl.SSLError):
        why = str(cause.reason).replace("_", " ").lower()
    else:
        why = os.strerror(number) if (number := getattr(cause, "errno", None)) else "no cause is known"
    return text.format(error=error, cause=why)
