"""A fleet as lines of text: what is so of all first, then an engine each."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rich.cells import cell_len

from kvferry.terminal import printable
from kvferry.top.detail import TABLE, detail, extra
from kvferry.top.figures import Figures
from kvferry.top.layout import Column, Line, Look, broken, fit, row, shortened
from kvferry.top.seen import Engine, Fleet
from kvferry.top.units import number, percent
from kvferry.units import format_age, format_bytes, format_seconds

_NAME = 23
"""Cells that an engine's name has, if it needs them, whatever else there is no room for."""
_FEW = 3
"""Engines that are listed however small the terminal is."""
_MISSES = 2
"""Lines of reasons where there is no room for all."""
_COLUMNS = (
    Column("run", 4),
    Column("wait", 5),
    Column("prompt/s", 9),
    Column("at hand", 8),
    Column("start", 6),
    Column("loaded/s", 10),
    Column("p99", 8),
    Column("failed", 7),
)
_WIDE = (
    Column("answer/s", 9),
    Column("fullest", 8),
    Column("expired", 8),
    Column("up", 10),
)
_WIDE_FROM = 120


def screen(fleet: Fleet, width: int, height: int, *, chosen: int | None, every: float) -> list[Line]:
    """As many lines as fit, each `width` cells wide at most.

    Args:
        chosen: the engine that is told of in detail; None of all together.
        every: seconds between readings.
    """
    engines = list_of(fleet, width, chosen)
    about = fleet.together if chosen is None else fleet.engines[chosen].figures
    top = [title(fleet, width, every), about_line(fleet, chosen, width)]
    room = height - len(top) - 1
    least = min(len(engines), _FEW + 1)
    body = [] if about is None else _body(about, width, max(0, room - least))
    room -= len(body)
    shown = _cut(engines, max(room, 2))
    room -= len(shown)
    more = [] if about is None else list(extra(about, width))[: max(0, room)]
    return [*top, *body, *more, Line(""), *shown][:height]


def _body(about: Figures, width: int, room: int) -> list[Line]:
    whole = list(detail(about, width))
    return whole if len(whole) <= room else list(detail(about, width, misses=_MISSES))[:room]


def text(fleet: Fleet, width: int, every: float) -> str:
    """All of it, for a file or a pipe."""
    lines = [title(fleet, width, every), *map(Line, broken(_about(fleet, None), width))]
    if fleet.together is not None:
        lines += [*detail(fleet.together, width), *extra(fleet.together, width)]
    return (
        "\n".join(line.text.rstrip() for line in [*lines, Line(""), *list_of(fleet, width, None, whole=True)])
        + "\n"
    )


def title(fleet: Fleet, width: int, every: float) -> Line:
    """The first line."""
    said = f"kvferry top  {fleet.answering} of {len(fleet.engines)} engines answer, read every {every:g} s"
    clock = time.strftime("%H:%M:%S", time.localtime(fleet.at))
    return Line(fit(said, max(0, width - len(clock) - 1)) + f" {clock}", Look.TITLE)


def about_line(fleet: Fleet, chosen: int | None, width: int) -> Line:
    """Of what the lines below it are."""
    return Line(fit(_about(fleet, chosen), width), Look.CHOSEN)


def _about(fleet: Fleet, chosen: int | None) -> str:
    if chosen is not None:
        engine = fleet.engines[chosen]
        return f"{_named(engine)}{', ' if engine.model else ''}{engine.model}"
    models = sorted({engine.model for engine in fleet.engines if engine.model})
    return f"all engines{': ' if models else ''}{', '.join(models)}"


def list_of(fleet: Fleet, width: int, chosen: int | None, *, whole: bool = False) -> list[Line]:
    """A heading, and a line of every engine; `whole` if why one is silent may take several."""
    columns = (*_COLUMNS, *(_WIDE if width >= _WIDE_FROM else ()))
    longest = max((cell_len(printable(_named(engine))) for engine in fleet.engines), default=0)
    table = min(width, max(TABLE, longest + sum(column.width for column in columns)))
    least = min(longest, _NAME)
    lines = [Line(row("engine", [column.head for column in columns], columns, table, least), Look.HEAD)]
    for place, engine in enumerate(fleet.engines):
        if engine.figures is None:
            lines += [Line(line, Look.BAD) for line in _silent(engine, fleet.at, width, whole=whole)]
            continue
        cells = [*_cells(engine.figures)][: len(_COLUMNS)]
        if len(columns) > len(_COLUMNS):
            cells += _wide(engine.figures, engine.started, fleet.at)
        look = Look.CHOSEN if place == chosen else Look.PLAIN
        lines.append(Line(row(_named(engine), cells, columns, table, least), look))
    return lines


def _cut(lines: list[Line], room: int) -> list[Line]:
    """As many as there is room for: first the chosen engine, then those that are silent."""
    if len(lines) <= room:
        return lines
    head, *engines = lines
    urgent = sorted(engines, key=lambda line: (line.look is not Look.CHOSEN, line.look is not Look.BAD))
    left_out = urgent[max(0, room - 2) :]
    kept = [line for line in engines if not any(line is each for each in left_out)]
    return [head, *kept, Line(f"and {len(left_out)} more", Look.HEAD)]


def _named(engine: Engine) -> str:
    role = f" {engine.role}" if engine.role else ""
    return f"{engine.name}{role}{'' if engine.ferry or engine.figures is None else ' (no kvferry)'}"


def _silent(engine: Engine, at: float, width: int, *, whole: bool) -> list[str]:
    """Why there are no figures; in one line, a long name makes room for that."""
    if engine.silence is None:
        said = "asked, has not answered yet"
    else:
        since = time.strftime("%H:%M:%S", time.localtime(engine.silence.since))
        said = f"no answer since {since} ({format_age(at - engine.silence.since)}): {engine.silence.why}"
    if whole:
        return broken(f"{_named(engine)}  {said}", width)
    return [fit(f"{shortened(_named(engine), max(_NAME, width - cell_len(said) - 2))}  {said}", width)]


def at_hand(tokens: dict[str, float] | None) -> float | None:
    """Share of prompts' tokens that were not computed; None of no tokens."""
    total = sum((tokens or {}).values())
    return 1 - (tokens or {}).get("computed", 0.0) / total if total else None


def _cells(of: Figures) -> Iterator[str]:
    rates, totals, levels = of.rates, of.totals, of.levels
    yield number(levels.running)
    yield number(levels.waiting)
    yield number(None if rates is None else rates.prompt_tokens)
    yield percent(None if rates is None else at_hand(dict(rates.tokens)))
    yield percent(at_hand(dict(totals.tokens)))
    yield "-" if rates is None else format_bytes(sum(source.load_bytes for source in rates.sources.values()))
    slowest = [source.load_seconds.p99 for source in totals.sources.values()]
    yield format_seconds(max(seen)) if (seen := [each for each in slowest if each is not None]) else "-"
    yield number(sum(totals.failed.values()))


def _wide(of: Figures, started: float | None, at: float) -> Iterator[str]:
    fullest = max((room.share for room in of.levels.tiers.values()), default=None)
    yield number(None if of.rates is None else of.rates.generated_tokens)
    yield percent(fullest)
    yield number(of.totals.leases_expired)
    yield "-" if started is None else format_age(at - started)
