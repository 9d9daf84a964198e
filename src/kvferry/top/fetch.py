"""Asks addresses what they have to say."""

from __future__ import annotations

import time

import httpx
import msgspec

from kvferry.errors import ConfigError, ProtocolError
from kvferry.observe.fetch import HEALTH, Health, fetch, http_address
from kvferry.top.exposition import Scrape, read

_SECONDS = 5.0
"""After which no answer is no answer: an API server that is busy takes a while."""


def address(text: str) -> str:
    """The address of an engine or a router.

    Raises:
        ConfigError: it cannot be one.
    """
    if (found := http_address(text)) is None:
        raise ConfigError(
            f"{text!r} is no URL of an engine or a router; give one such as http://127.0.0.1:8000"
        )
    return found


async def ask(http: httpx.AsyncClient, url: str) -> Scrape | Health:
    """The metrics of an engine, or the engines of a router, which has no metrics.

    Raises:
        ProtocolError: neither; the message says what there is instead.
    """
    metrics = await fetch(http, f"{url}/metrics", _SECONDS)
    if metrics.status == 200:
        return read(metrics.text, time.monotonic())
    health = await fetch(http, f"{url}/health", _SECONDS)
    try:
        return HEALTH.decode(health.body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"/metrics answers with status {metrics.status}") from error
