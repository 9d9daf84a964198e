"""Requests to engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import httpx

from kvferry.serving.router.hop import Hop
from kvferry.serving.router.replies import Headers, Reply
from kvferry.serving.router.settings import RouterSettings

NOT_CONNECTED = (httpx.ConnectError, httpx.ConnectTimeout)
"""The engine never got the request."""

# Of one connection only, or said anew by whoever sends.
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
    """Those headers that go through a proxy."""
    return tuple((name.lower(), value) for name, value in headers if name.lower() not in _NOT_RELAYED)


def open_client(settings: RouterSettings, hop: Hop) -> httpx.AsyncClient:
    """The client for all engines.

    A connection serves one request: an engine closes idle ones after a few seconds, and a request sent at
    that moment fails as if the engine were dead. No limit on their number: engines queue, not the router.
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
    """An answer whose body has not been read; leaving the block early closes the connection, which aborts it.

    Raises:
        httpx.TransportError: no answer.
    """
    # Uncompressed: what comes is relayed as it is.
    sent = [*headers, (b"accept-encoding", b"identity")]
    async with client.stream(method, url, headers=sent, content=body) as response:
        yield response


async def read_whole(response: httpx.Response) -> Reply:
    """The whole answer.

    Raises:
        httpx.TransportError: it broke off.
    """
    body = b"".join([chunk async for chunk in response.aiter_raw()])
    return Reply(response.status_code, relayed(response.headers.raw), body)


def says(error: BaseException) -> str:
    """A transport error in words; some of httpx's have no message."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
