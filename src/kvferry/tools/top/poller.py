"""Read the metrics of all addresses periodically."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import anyio
import httpx
import msgspec
from anyio.abc import TaskGroup

from kvferry.errors import ConfigError, ProtocolError
from kvferry.observe.exposed_names import ROUTER_PREFIX
from kvferry.observe.fetch import HEALTH, Health, fetch
from kvferry.observe.http_address import server_url
from kvferry.tools.top.addresses import FleetView, PolledAddress, fleet_view
from kvferry.tools.top.exposition import Scrape, parse_page

# A busy API server answers slowly.
_SECONDS = 5.0


def parse_address(text: str) -> str:
    """Return the base URL of an engine or router, without an ending such as ``/metrics``.

    Raises:
        ConfigError: the text is not a URL.
    """
    if (found := server_url(text)) is None:
        raise ConfigError(
            f"{text!r} is no URL of an engine or a router; give one such as http://127.0.0.1:8000"
        )
    return found


async def fetch_address(http: httpx.AsyncClient, url: str) -> Scrape | Health:
    """Read `/metrics` of an engine, or `/health` of a router.

    Raises:
        ProtocolError: the address does not answer, serves neither `/metrics` nor a router's `/health`, or
            serves a `/metrics` that `parse_page` refuses.
    """
    metrics = await fetch(http, f"{url}/metrics", _SECONDS)
    # A router's own metrics are not shown, but the engines behind it.
    if metrics.status == 200 and ROUTER_PREFIX.encode() not in metrics.body:
        return parse_page(metrics.text, time.monotonic())
    health = await fetch(http, f"{url}/health", _SECONDS)
    try:
        return HEALTH.decode(health.body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"/metrics answers with status {metrics.status}") from error


class Poller:
    """Reader of the metrics of engines, which keeps the last two readings of each, for one event loop.

    If an address belongs to a router, the engines that the router lists are read too.

    Args:
        changed: function that is called after each reading of an address, whether or not it succeeded.
    """

    def __init__(self, http: httpx.AsyncClient, urls: Sequence[str], changed: Callable[[], None]) -> None:
        self._http = http
        self._seen = {url: PolledAddress(url) for url in urls}
        self._changed = changed

    def fleet(self) -> FleetView:
        """Return the state of all engines, from the last readings."""
        return fleet_view(list(self._seen.values()), time.time())

    async def read_once(self) -> None:
        """Read the metrics of all addresses once, including engines that a router lists."""
        polled: set[str] = set()
        # A router that is read adds engines.
        while new := self._seen.keys() - polled:
            polled |= new
            async with anyio.create_task_group() as group:
                for url in new:
                    group.start_soon(self._read, url)

    async def keep_reading(self, every: float, group: TaskGroup) -> None:
        """Read the metrics of all addresses every so many seconds, until the task is cancelled."""
        reading: set[str] = set()
        while True:
            for url in self._seen.keys() - reading:
                reading.add(url)
                group.start_soon(self._read_for_ever, url, every)
            await anyio.sleep(every)

    async def _read_for_ever(self, url: str, every: float) -> None:
        while True:
            # An address that answers slowly is read less often, and delays no other.
            due = anyio.current_time() + every
            await self._read(url)
            await anyio.sleep_until(due)

    async def _read(self, url: str) -> None:
        try:
            answer = await fetch_address(self._http, url)
        except ProtocolError as error:
            self._seen[url] = self._seen[url].failed(time.time(), str(error))
        else:
            if isinstance(answer, Health):
                self._routed(url, answer)
            else:
                self._seen[url] = self._seen[url].answered(answer)
        self._changed()

    def _routed(self, url: str, answer: Health) -> None:
        self._seen[url] = replace(self._seen[url], role="router", silence=None)
        for role, engines in (("prefill", answer.prefill), ("decode", answer.decode)):
            for engine in engines:
                try:
                    parse_address(engine.url)
                except ConfigError:
                    continue  # the router has an invalid URL
                known = self._seen.setdefault(engine.url, PolledAddress(engine.url))
                self._seen[engine.url] = replace(known, role=role)
