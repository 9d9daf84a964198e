"""The state of a polled address: its last two readings, or the reason why it does not answer.

ASKED ──answered──▶ ANSWERS ──failed──▶ SILENT ──answered──▶ ANSWERS
  └──────────────────failed──────────────▲
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from kvferry.tools.top.derive import compute_figures
from kvferry.tools.top.exposition import Scrape
from kvferry.tools.top.figures import Figures
from kvferry.tools.top.window import Window, window


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
        role: ``prefill`` or ``decode`` if a router lists the engine, ``router`` for a router, otherwise
            empty.
        before: successful reading before `now`; None until two have succeeded. The engine may have restarted
            between the two.
        now: last successful reading; None if no reading has succeeded.
        silence: None if the last reading succeeded, or if the address was not read yet.
    """

    url: str
    role: str = ""
    before: Scrape | None = None
    now: Scrape | None = None
    silence: Unreachable | None = None

    @property
    def name(self) -> str:
        """Address without its scheme and credentials."""
        parts = urlsplit(self.url)
        # A password in an address must not appear on a screen.
        return parts.netloc.rpartition("@")[2] + parts.path or self.url

    @property
    def answers(self) -> bool:
        return self.now is not None and self.silence is None

    def answered(self, scrape: Scrape) -> PolledAddress:
        """Return a copy of this address after a successful reading, which becomes `now`."""
        return replace(self, before=self.now, now=scrape, silence=None)

    def failed(self, at: float, why: str) -> PolledAddress:
        """Return a copy of this address after a failed reading, at so many seconds since 1970."""
        # Of several failures the first says since when, and the last says why.
        return replace(self, silence=Unreachable(self.silence.since if self.silence else at, why))

    def windows(self) -> Iterator[tuple[str, Window]]:
        """Yield the label ``engine`` and the metrics of each engine at this address, if it answers."""
        if self.now is not None and self.silence is None:
            for engine in self.now.engines:
                yield engine, window(self.before, self.now, engine)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """A row of the list of engines that `kvferry top` shows.

    Attributes:
        name: address of the engine; if the address has several engines, followed by ``/`` and `engine`.
        role: ``prefill`` or ``decode`` if a router lists the engine; ``router`` for a router that has stopped
            answering; otherwise empty.
        engine: label ``engine`` of the metrics, such as ``0``; empty if the address does not answer.
        model: name of the served model; empty if unknown.
        ferry: True if the engine runs kvferry's connector.
        started: start of the engine's process, in seconds since 1970; None if unknown.
        silence: None if the last reading succeeded, or if the address was not read yet.
        figures: None if the engine does not answer.
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
        at: seconds since 1970.
        engines: rows of all engines, in the order of their addresses, whether they answer or not.
        together: figures of all engines that answer, combined; None if no engine answers.
    """

    at: float
    engines: tuple[EngineRow, ...]
    together: Figures | None

    @property
    def answering(self) -> int:
        return sum(engine.figures is not None for engine in self.engines)


def fleet_view(all_seen: list[PolledAddress], at: float) -> FleetView:
    """Combine the states of all polled addresses, at so many seconds since 1970."""
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
        # A router that answers is no engine.
        if not own and not (seen.role == "router" and seen.silence is None):
            engines.append(EngineRow(name=seen.name, url=seen.url, role=seen.role, silence=seen.silence))
    return FleetView(at, tuple(engines), compute_figures(windows) if windows else None)
