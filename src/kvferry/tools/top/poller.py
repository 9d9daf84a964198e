"""Read the metrics of all addresses periodically."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import anyio
import httpx
import msgspec
from anyio.abc import TaskGroup

from kvferry.common.errors import ConfigError, ProtocolError
from kvferry.observe import ROUTER_PREFIX
from kvferry.tools.fetch import HEALTH, Health, fetch, server_url
from kvferry.tools.top.exposition import Scrape, Window, parse_page, window
from kvferry.tools.top.figures import Figures, compute_figures

# A busy API server answers slowly.
_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A failure: `since` is the first one after the last success, in seconds since 1970."""

    since: float
    why: str


@dataclass(frozen=True, slots=True)
class PolledAddress:
    """An engine or router that `kvferry top` polls, and the last two readings of its metrics."""

    url: str
    # ``prefill`` or ``decode`` if a router lists the engine, ``router`` for a router, otherwise empty.
    role: str = ""
    # Successful reading before `now`; None until two have succeeded. The engine may have restarted between
    # the two.
    before: Scrape | None = None
    now: Scrape | None = None  # last successful reading; None if no reading has succeeded
    # None if the last reading succeeded, or if the address was not read yet.
    silence: Unreachable | None = None

    @property
    def name(self) -> str:
        """Address without its scheme and credentials."""
        parts = urlsplit(self.url)
        # A password in an address must not appear on a screen.
        return parts.netloc.rpartition("@")[2] + parts.path or self.url

    def answered(self, scrape: Scrape) -> PolledAddress:
        return replace(self, before=self.now, now=scrape, silence=None)

    def failed(self, at: float, why: str) -> PolledAddress:
        """Return a copy of this address after a failed reading, at so many seconds since 1970."""
        # Of several failures the first says since when, and the last says why.
        return replace(self, silence=Unreachable(self.silence.since if self.silence else at, why))

    def windows(self) -> list[tuple[str, Window]]:
        """Return the label ``engine`` and the metrics of each engine at this address, if it answers."""
        if self.now is None or self.silence is not None:
            return []
        return [(engine, window(self.before, self.now, engine)) for engine in self.now.engines]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """A row of the list of engines that `kvferry top` shows."""

    name: str  # address of the engine; if the address has several engines, followed by ``/`` and `engine`
    url: str
    # ``prefill`` or ``decode`` if a router lists the engine; ``router`` for a router that has stopped
    # answering; otherwise empty.
    role: str
    engine: str = ""  # label ``engine`` of the metrics, such as ``0``; empty if the address does not answer
    model: str = ""
    ferry: bool = False  # True if the engine runs kvferry's connector
    started: float | None = None  # start of the engine's process, in seconds since 1970; None if unknown
    # None if the last reading succeeded, or if the address was not read yet.
    silence: Unreachable | None = None
    figures: Figures | None = None  # None if the engine does not answer


@dataclass(frozen=True, slots=True)
class FleetView:
    """The state of all engines at one time."""

    at: float  # seconds since 1970
    # Rows of all engines, in the order of their addresses, whether they answer or not.
    engines: tuple[EngineRow, ...]
    together: Figures | None  # figures of all engines that answer, combined; None if no engine answers

    @property
    def answering(self) -> int:
        return sum(engine.figures is not None for engine in self.engines)


def fleet_view(all_seen: list[PolledAddress], at: float) -> FleetView:
    """Combine the states of all polled addresses, at so many seconds since 1970."""
    engines: list[EngineRow] = []
    windows: list[Window] = []
    for seen in all_seen:
        own = seen.windows()
        windows += [of for _, of in own]
        row = EngineRow(name=seen.name, url=seen.url, role=seen.role, silence=seen.silence)
        if scrape := seen.now if own else None:
            row = replace(row, model=scrape.model, ferry=scrape.ferry, started=scrape.started)
        for number, of in own:
            name = seen.name if len(own) == 1 else f"{seen.name}/{number}"
            engines.append(replace(row, name=name, engine=number, figures=compute_figures([of])))
        # A router that answers is no engine.
        if not own and not (seen.role == "router" and seen.silence is None):
            engines.append(row)
    return FleetView(at, tuple(engines), compute_figures(windows) if windows else None)


def parse_address(text: str) -> str:
    """Return the base URL of an engine or router, without ``/metrics``. Raise ConfigError for no URL."""
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
        prefill = {engine.url for engine in answer.prefill}
        for role, engines in (("prefill", answer.prefill), ("decode", answer.decode)):
            for engine in engines:
                try:
                    parse_address(engine.url)
                except ConfigError:
                    continue  # the router has an invalid URL
                known = self._seen.setdefault(engine.url, PolledAddress(engine.url))
                both = role == "decode" and engine.url in prefill
                self._seen[engine.url] = replace(known, role="both" if both else role)
