"""Send HTTP requests to engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import httpx

from kvferry.serving.router.hop import Hop
from kvferry.serving.router.replies import Headers, Reply
from kvferry.serving.router.settings import RouterSettings

NOT_CONNECTED = (httpx.ConnectError, httpx.ConnectTimeout)
"""Exceptions that mean that the engine has not received the request."""

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


def relayed(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the headers that the router forwards, with their names in lower case.

    Headers that apply to one connection only are left out, and so are headers that each sender sets itself,
    such as content-length.

    Args:
        headers: (name, value) pairs of a request or an answer.
    """
    return tuple((name.lower(), value) for name, value in headers if name.lower() not in _NOT_RELAYED)


def open_client(settings: RouterSettings, hop: Hop) -> httpx.AsyncClient:
    """Create the HTTP client with which the router sends requests to all engines.

    Each connection serves only one request. If connections were reused, an engine could close an idle one
    just when the next request is sent, and the router would take this for a failure of the engine. The number
    of connections is unlimited, so that requests queue in the engines and not in the router.

    Args:
        settings: settings of the router, with the timeouts.
        hop: this router's entry in Via headers. The client adds it to each request that has no Via header.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    timeout = httpx.Timeout(settings.decode_idle_seconds, connect=settings.connect_seconds)
    return httpx.AsyncClient(
        headers=hop.passed_on(), limits=limits, timeout=timeout, trust_env=False, follow_redirects=False
    )


@asynccontextmanager
async def opened(
    client: httpx.AsyncClient, method: str, url: str, headers: Headers, body: bytes
) -> AsyncIterator[httpx.Response]:
    """Send a request, and yield the response before its body is read.

    The end of the ``with`` block closes the connection. The engine then aborts an incomplete request.

    Args:
        client: HTTP client for all engines.
        method: HTTP method.
        url: URL of the endpoint at the engine.
        headers: headers of the request.
        body: complete body of the request.

    Raises:
        httpx.TransportError: no answer arrived.
    """
    # Ask for an uncompressed answer, because its bytes are relayed unchanged.
    sent = [*headers, (b"accept-encoding", b"identity")]
    async with client.stream(method, url, headers=sent, content=body) as response:
        yield response


async def read_whole(response: httpx.Response) -> Reply:
    """Read the rest of an engine's response, and return the complete answer.

    Raises:
        httpx.TransportError: the connection broke.
    """
    body = b"".join([chunk async for chunk in response.aiter_raw()])
    return Reply(response.status_code, relayed(response.headers.raw), body)


def describe_error(error: BaseException) -> str:
    """Return a transport error as text: its class and, if it has one, its message."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
