"""Send requests to engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import httpx

from kvferry.serving.router.hop import Hop
from kvferry.serving.router.replies import Headers, Reply
from kvferry.serving.router.settings import RouterSettings

NOT_CONNECTED = (httpx.ConnectError, httpx.ConnectTimeout)
"""Exceptions after which the engine cannot have received the request."""

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
    """Return the headers that a proxy passes on."""
    return tuple((name.lower(), value) for name, value in headers if name.lower() not in _NOT_RELAYED)


def open_client(settings: RouterSettings, hop: Hop) -> httpx.AsyncClient:
    """Return the client for all engines.

    A connection serves one request, because engines close idle connections, and a request sent at that moment
    would fail as if the engine were dead. Connections are unlimited: engines queue, not the router.
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
    """Yield an answer before its body is read. Leaving the block closes the connection, which aborts it.

    Raises:
        httpx.TransportError: no answer arrived.
    """
    # Uncompressed: what comes is relayed as it is.
    sent = [*headers, (b"accept-encoding", b"identity")]
    async with client.stream(method, url, headers=sent, content=body) as response:
        yield response


async def read_whole(response: httpx.Response) -> Reply:
    """Return the complete answer.

    Raises:
        httpx.TransportError: the connection broke.
    """
    body = b"".join([chunk async for chunk in response.aiter_raw()])
    return Reply(response.status_code, relayed(response.headers.raw), body)


def describe_error(error: BaseException) -> str:
    """Return a transport error as text; some of httpx's errors have no message."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
