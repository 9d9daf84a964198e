"""Asks addresses what they have to say."""

from __future__ import annotations

import time
from urllib.parse import urlsplit

import anyio
import httpx
import msgspec

from kvferry.errors import ConfigError, ProtocolError
from kvferry.top.exposition import Scrape, read

_SECONDS = 5.0
"""After which no answer is no answer: an API server that is busy takes a while."""
_MOST_BYTES = 64 << 20


class Health(msgspec.Struct):
    """What a kvferry router says of its engines."""

    class Engine(msgspec.Struct):
        """One of them."""

        url: str

    prefill: list[Engine]
    decode: list[Engine]


def address(text: str) -> str:
    """The address of an engine or a router, as it was given.

    Raises:
        ConfigError: it cannot be one.
    """
    try:
        parts = urlsplit(text)
        fine = parts.scheme in {"http", "https"} and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        fine = False
    if not fine:
        raise ConfigError(
            f"{text!r} is no URL of an engine or a router; give one such as http://127.0.0.1:8000"
        )
    return text.removesuffix("/").removesuffix("/metrics").removesuffix("/")


def client() -> httpx.AsyncClient:
    """For all addresses; an idle engine closes connections, so each serves once."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(limits=limits, timeout=_SECONDS, trust_env=False, follow_redirects=False)


async def ask(http: httpx.AsyncClient, url: str) -> Scrape | Health:
    """The metrics of an engine, or the engines of a router, which has no metrics.

    Raises:
        ProtocolError: neither; the message says what there is instead.
    """
    try:
        with anyio.fail_after(_SECONDS):
            status, body = await _get(http, f"{url}/metrics")
            if status == 200:
                return read(body.decode(errors="replace"), time.monotonic())
            return await _health(http, url, status)
    except TimeoutError as error:
        raise ProtocolError(f"silent for {_SECONDS:g} s") from error
    except (httpx.TimeoutException, httpx.ConnectError) as error:
        raise ProtocolError("cannot connect") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ProtocolError(f"{type(error).__name__}: {error}") from error


async def _health(http: httpx.AsyncClient, url: str, status: int) -> Health:
    _, body = await _get(http, f"{url}/health")
    try:
        return msgspec.json.decode(body, type=Health)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"/metrics answers with status {status}") from error


async def _get(http: httpx.AsyncClient, url: str) -> tuple[int, bytes]:
    body = bytearray()
    async with http.stream("GET", url) as response:
        async for chunk in response.aiter_bytes():
            body += chunk
            if len(body) > _MOST_BYTES:
                raise ProtocolError(f"{urlsplit(url).path} is larger than {_MOST_BYTES >> 20} MiB")
    return response.status_code, bytes(body)
