"""Read the metrics of an engine, or the engines of a router."""

from __future__ import annotations

import time

import httpx
import msgspec

from kvferry.errors import ConfigError, ProtocolError
from kvferry.observe.fetch import HEALTH, Health, fetch, http_address
from kvferry.top.exposition import Scrape, parse_page

_SECONDS = 5.0
"""Timeout of a reading; a busy API server answers slowly."""


def parse_address(text: str) -> str:
    """Return the base URL of an engine or router.

    Raises:
        ConfigError: the text is not a URL.
    """
    if (found := http_address(text)) is None:
        raise ConfigError(
            f"{text!r} is no URL of an engine or a router; give one such as http://127.0.0.1:8000"
        )
    return found


async def fetch_address(http: httpx.AsyncClient, url: str) -> Scrape | Health:
    """Return the metrics of an engine, or the health of a router, which has no metrics.

    Raises:
        ProtocolError: the address serves neither.
    """
    metrics = await fetch(http, f"{url}/metrics", _SECONDS)
    if metrics.status == 200:
        return parse_page(metrics.text, time.monotonic())
    health = await fetch(http, f"{url}/health", _SECONDS)
    try:
        return HEALTH.decode(health.body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"/metrics answers with status {metrics.status}") from error
