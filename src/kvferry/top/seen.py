"""What is known of an address, as its answers come in or fail to.

ASKED ──heard──▶ ANSWERS ──failed──▶ SILENT ──heard──▶ ANSWERS
  └────────────────failed────────────────▲
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from kvferry.top.derive import figures
from kvferry.top.exposition import Scrape
from kvferry.top.figures import Figures
from kvferry.top.window import Window, window


@dataclass(frozen=True, slots=True)
class Silence:
    """It does not answer.

    Attributes:
        since: when it first did not, in seconds since 1970.
        why: what it does instead.
    """

    since: float
    why: str


@dataclass(frozen=True, slots=True)
class Seen:
    """One address.

    Attributes:
        url: of it.
        role: ``prefill`` or ``decode`` if a router said so, ``router`` of a router, else empty.
        before, now: the last two readings, which need not be of the same life of the engine.
        silence: none if the last answer was one.
    """

    url: str
    role: str = ""
    before: Scrape | None = None
    now: Scrape | None = None
    silence: Silence | None = None

    @property
    def name(self) -> str:
        """Its address, short."""
        parts = urlsplit(self.url)
        return parts.netloc.rpartition("@")[2] + parts.path or self.url

    @property
    def answers(self) -> bool:
        """It has, and the last time too."""
        return self.now is not None and self.silence is None

    def heard(self, scrape: Scrape) -> Seen:
        """It answers."""
        return replace(self, before=self.now, now=scrape, silence=None)

    def failed(self, at: float, why: str) -> Seen:
        """It does not; `at` in seconds since 1970."""
        return replace(self, silence=Silence(self.silence.since if self.silence else at, why))

    def windows(self) -> Iterator[tuple[str, Window]]:
        """Of every engine behind it that answers, with its number."""
        if self.now is not None and self.silence is None:
            for engine in self.now.engines:
                yield engine, window(self.before, self.now, engine)


@dataclass(frozen=True, slots=True)
class Engine:
    """A line of the list.

    Attributes:
        name: its address, with its number where there are several.
        url: whom to ask.
        role: see `Seen`.
        engine: its number at that address.
        model: that it serves.
        ferry: it runs kvferry's connector.
        started: its process, in seconds since 1970.
        silence: why there are no figures.
        figures: none if it does not answer.
    """

    name: str
    url: str
    role: str
    engine: str = ""
    model: str = ""
    ferry: bool = False
    started: float | None = None
    silence: Silence | None = None
    figures: Figures | None = None


@dataclass(frozen=True, slots=True)
class Fleet:
    """All that is looked at.

    Attributes:
        at: seconds since 1970.
        engines: those that answer, and those that do not, in the order of their addresses.
        together: of those that answer; None if none does.
    """

    at: float
    engines: tuple[Engine, ...]
    together: Figures | None

    @property
    def answering(self) -> int:
        """How many."""
        return sum(engine.figures is not None for engine in self.engines)


def fleet(all_seen: list[Seen], at: float) -> Fleet:
    """What all addresses say. A router that answers is not one of the engines."""
    engines: list[Engine] = []
    windows: list[Window] = []
    for seen in all_seen:
        own = list(seen.windows())
        windows += [of for _, of in own]
        for number, of in own:
            name = seen.name if len(own) == 1 else f"{seen.name}/{number}"
            assert seen.now is not None  # noqa: S101  # it has windows
            said = seen.now
            engines.append(
                Engine(
                    name,
                    seen.url,
                    seen.role,
                    number,
                    said.model,
                    said.ferry,
                    said.started,
                    None,
                    figures([of]),
                )
            )
        if not own and not (seen.role == "router" and seen.silence is None):
            engines.append(Engine(seen.name, seen.url, seen.role, silence=seen.silence))
    return Fleet(at, tuple(engines), figures(windows) if windows else None)
