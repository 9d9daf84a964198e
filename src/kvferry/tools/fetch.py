"""HTTP requests to engines and routers, for the commands that inspect them.

A user may give the address of any server by mistake. So each answer has a maximum size and a deadline.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import anyio
import httpx
import msgspec

from kvferry.common.errors import ProtocolError

MAX_BYTES = 64 << 20
"""Maximum size of an answer, in bytes. A page of metrics has about 100 KB per engine."""
_CONNECT_SECONDS = 5.0


class HttpReply(NamedTuple):
    """A complete HTTP answer."""

    status: int
    body: bytes

    @property
    def fine(self) -> bool:
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        """The body as UTF-8 text. Invalid bytes are replaced."""
        return self.body.decode(errors="replace")

    @property
    def json(self) -> Any:
        """The body decoded as JSON; None if it is not JSON."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None


class Health(msgspec.Struct, frozen=True):
    """The answer of a kvferry router to `/health`."""

    class Engine(msgspec.Struct, frozen=True):
        """The state of one of the router's engines. `reason` is why it is down."""

        url: str
        up: bool = False
        reason: str | None = None

    prefill: list[Engine]
    decode: list[Engine]


HEALTH = msgspec.json.Decoder(Health)
"""Decoder of `Health`.

The module creates it at import: msgspec crashes if several threads decode a type for the first time at once.
"""


def client(headers: Mapping[str, str] | None = None) -> httpx.AsyncClient:
    """Create an HTTP client for requests to engines and routers, with these headers in every request."""
    # A connection serves one request: an engine could close an idle one just when the next request is sent,
    # and the request would fail.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    # `fetch` limits the whole request.
    timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
    return httpx.AsyncClient(
        limits=limits, timeout=timeout, trust_env=False, follow_redirects=False, headers=headers
    )


async def fetch(
    http: httpx.AsyncClient,
    url: str,
    seconds: float,
    post: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    max_bytes: int = MAX_BYTES,
) -> HttpReply:
    """Send an HTTP request, and return the answer, whatever its status.

    Args:
        seconds: maximum time from the start of the request to the end of the answer, in seconds.
        post: JSON body of a POST request; None for a GET request.

    Raises:
        ProtocolError: the URL is not valid, the server cannot be reached, no complete answer arrives in time,
            or the answer is too large.
    """
    method, kind = ("GET", {}) if post is None else ("POST", {"content-type": "application/json"})
    body = bytearray()
    try:
        with anyio.fail_after(seconds):
            async with http.stream(method, url, content=post, headers={**kind, **(headers or {})}) as answer:
                async for piece in answer.aiter_bytes():
                    body += piece
                    # The server may be any, and its answer endless.
                    if len(body) > max_bytes:
                        raise ProtocolError(f"{urlsplit(url).path} is larger than {max_bytes >> 20} MiB")
    except TimeoutError as error:
        what = f"{urlsplit(url).path} does not end in" if body else "silent for"
        raise ProtocolError(f"{what} {seconds:g} s") from error
    except (httpx.TimeoutException, httpx.ConnectError) as error:
        raise ProtocolError(f"cannot connect{_why(error)}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ProtocolError(f"{type(error).__name__}: {error}") from error
    return HttpReply(answer.status_code, bytes(body))


def _why(error: BaseException) -> str:
    """Return a colon and the message of the root cause, to append to a sentence; empty if it says nothing."""
    if isinstance(error, BaseExceptionGroup):  # a host name with several addresses
        return _why(error.exceptions[0])
    if cause := error.__cause__ or error.__context__:
        # The messages of httpx say less than the system's.
        return _why(cause)
    if isinstance(error, ssl.SSLCertVerificationError):
        return f": its certificate is not trusted, {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f": no TLS with it ({error.reason})"
    if not isinstance(error, OSError) or error.errno is None:
        return ""
    # Errors of the resolver have negative numbers and a text of their own.
    return f": {os.strerror(error.errno) if error.errno > 0 else error.strerror}"


def http_address(text: str) -> str | None:
    """Return the base URL in `text`, without ``/v1`` or ``/metrics``; None if the text is not an HTTP URL.

    >>> [http_address(text) for text in ("http://127.0.0.1:8000/metrics", "https://a.b/one/v1/", "a:1")]
    ['http://127.0.0.1:8000', 'https://a.b/one', None]
    """
    try:
        parts = urlsplit(text)
        host = (parts.hostname or "").strip(".").encode("idna")  # as the resolver does
        if parts.scheme not in ("http", "https") or not host or parts.port == 0:
            return None
    except ValueError:  # unmatched brackets, a port that is not a number, an empty or long label
        return None
    # Users copy the address of the API, or the one that Prometheus scrapes.
    path = parts.path.rstrip("/").removesuffix("/metrics").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}"


def server_url(text: str) -> str | None:
    """Return the base URL of an HTTP server that a user names by a URL, or by host and port alone.

    >>> [server_url(text) for text in ("https://a.b/v1", "a:8000", "[::1]:8000", "a")]
    ['https://a.b', 'http://a:8000', 'http://[::1]:8000', None]
    """
    if "://" in text:
        return http_address(text)
    try:
        # A name alone is more likely a mistake than a server at port 80.
        has_port = urlsplit(f"//{text}").port is not None
    except ValueError:
        return None
    return http_address(f"http://{text}") if has_port else None
