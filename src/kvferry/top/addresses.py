"""The state of a polled address: its last two readings, or the reason why it does not answer.

ASKED ──answered──▶ ANSWERS ──failed──▶ SILENT ──answered──▶ ANSWERS
  └──────────────────failed──────────────▲
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from kvferry.top.derive import compute_figures
from kvferry.top.exposition import Scrape
from kvferry.top.figures import Figures
from kvferry.top.window import Window, window


@dataclass(frozen=True, slots=True)
class Unreachable:
    """The failure of an address that does not answer.

    Attributes:
        since: time of the first failure after the last success, in seconds since 1970.
        why: text of the last error.
    """

    since: float
    why: str


@dataclass(frozen=True, slots=True)
class PolledAddress:
    """An engine or router that `kvferry top` polls, and the last two readings of its metrics.

    Attributes:
        url: base URL.
        role: ``prefill`` or ``decode`` if a router lists the engine, ``router`` for a router, otherwise
            empty.
        before: successful reading before `now`; None until two readings have succeeded. The engine may have
            restarted between the two.
        now: last successful reading; None if no reading has succeeded.
        silence: time and error of the current failures; None if the last reading succeeded, or if the address
            was not read yet.
    """

    url: str
    role: str = ""
    before: Scrape | None = None
    now: Scrape | None = None
    silence: Unreachable | None = None

    @property
    def name(self) -> str:
        """Return the address without its scheme and credentials."""
        parts = urlsplit(self.url)
        return parts.netloc.rpartition("@")[2] + parts.path or self.url

    @property
    def answers(self) -> bool:
        """Return whether the last reading of the metrics succeeded."""
        return self.now is not None and self.silence is None

    def answered(self, scrape: Scrape) -> PolledAddress:
        """Return a copy of this address after a successful reading, which becomes `now`.

        Args:
            scrape: result of the reading.
        """
        return replace(self, before=self.now, now=scrape, silence=None)

    def failed(self, at: float, why: str) -> PolledAddress:
        """Return a copy of this address after a failed reading.

        The attribute `silence` gets the new error, with the time of the first failure since the last success.

        Args:
            at: time of the failed reading, in seconds since 1970.
            why: text of the error.
        """
        return replace(self, silence=Unreachable(self.silence.since if self.silence else at, why))

    def windows(self) -> Iterator[tuple[str, Window]]:
        """Yield the metrics of each engine at this address; nothing if the address does not answer.

        Yields:
            Value of the metrics' label ``engine``, such as ``0``, and a `Window` with that engine's current
            metric values and their rates.
        """
        if self.now is not None and self.silence is None:
            for engine in self.now.engines:
                yield engine, window(self.before, self.now, engine)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """A row of the list of engines that `kvferry top` shows.

    Attributes:
        name: address of the engine; if the address has several engines, followed by ``/`` and `engine`.
        url: base URL.
        role: ``prefill`` or ``decode`` if a router lists the engine; ``router`` for a router that has stopped
            answering; otherwise empty.
        engine: value of the label ``engine`` of the engine's metrics, such as ``0``, which tells engines at
            one address apart; empty if the address does not answer.
        model: name of the served model; empty if unknown.
        ferry: True if the engine runs kvferry's connector.
        started: start of the engine's process, in seconds since 1970; None if unknown.
        silence: time and error of the current failures; None if the last reading succeeded, or if the address
            was not read yet.
        figures: counts, rates and gauges of the engine; None if the engine does not answer.
    """

    name: str
    url: str
    role: str
    engine: str = ""
    model: str = ""
    ferry: bool = False
    started: float | None = None
    silence: Unreachable | None = None
    figures: Figures | None = None


@dataclass(frozen=True, slots=True)
class FleetView:
    """The state of all engines at one time.

    Attributes:
        at: time in seconds since 1970.
        engines: rows of all engines, in the order of their addresses, whether they answer or not.
        together: counts, rates and gauges of all engines that answer, combined; None if no engine answers.
    """

    at: float
    engines: tuple[EngineRow, ...]
    together: Figures | None

    @property
    def answering(self) -> int:
        """Return the number of engines that answer."""
        return sum(engine.figures is not None for engine in self.engines)


def fleet_view(all_seen: list[PolledAddress], at: float) -> FleetView:
    """Combine the states of all polled addresses into the state of all engines.

    A router that answers is not listed as an engine.

    Args:
        all_seen: polled addresses with their last readings.
        at: current time in seconds since 1970.
    """
    engines: list[EngineRow] = []
    windows: list[Window] = []
    for seen in all_seen:
        own = list(seen.windows())
        windows += [of for _, of in own]
        for number, of in own:
            name = seen.name if len(own) == 1 else f"{seen.name}/{number}"
            assert seen.now is not None  # noqa: S101  # the address has windows
            scrape = seen.now
            engines.append(
                EngineRow(
                    name=name,
                    url=seen.url,
                    role=seen.role,
                    engine=number,
                    model=scrape.model,
                    ferry=scrape.ferry,
                    started=scrape.started,
                    silence=None,
                    figures=compute_figures([of]),
                )
            )
        if not own and not (seen.role == "router" and seen.silence is None):
            engines.append(EngineRow(name=seen.name, url=seen.url, role=seen.role, silence=seen.silence))
    return FleetView(at, tuple(engines), compute_figures(windows) if windows else None)
