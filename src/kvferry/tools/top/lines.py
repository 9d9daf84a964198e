"""Render all engines as lines of text: first their figures together, then one line per engine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from rich.cells import cell_len

from kvferry.common.text import printable
from kvferry.common.units import format_age, format_bytes, format_seconds
from kvferry.tools.report import Column, fit_table, shortened, wrap
from kvferry.tools.top.detail import detail, extra
from kvferry.tools.top.figures import Figures
from kvferry.tools.top.layout import TextLine, TextStyle, fit, number, percent
from kvferry.tools.top.poller import EngineRow, FleetView

# The column with engines' names keeps this width, in cells, if its longest name needs it.
_NAME = 22
# So many engines keep their lines if the screen is low.
_FEW = 3
# Lines about misses at most, if not all lines fit on the screen.
_MISSES = 2
COLUMNS = (
    Column("engine", left=True, least=_NAME),
    Column("running", rank=1, minimum=6),
    Column("waiting", rank=2, minimum=6),
    Column("prompt/s", rank=4, minimum=7),
    Column("cached", rank=5, minimum=5),
    Column("loaded/s", rank=6, minimum=8),
    Column("p99", rank=7, minimum=7),
    Column("failed", rank=3, minimum=6),
    Column("answer/s", rank=8, minimum=7),
    Column("cached in all", rank=9, minimum=6),
    Column("tier full", rank=10, minimum=5),
    Column("expired", rank=11, minimum=6),
    Column("uptime", rank=12, minimum=8),
)


def screen(fleet: FleetView, width: int, height: int, *, chosen: int | None, every: float) -> list[TextLine]:
    """Return the lines of the live view. Less important lines are left out if they do not fit on the screen.

    Args:
        width, height: size of the screen, in terminal cells.
        chosen: index of the engine to show in detail; None to show all engines combined.
        every: seconds between two readings of the metrics.
    """
    engines = engine_list(fleet, width, chosen)
    about = fleet.together if chosen is None else fleet.engines[chosen].figures
    top = [_title(fleet, width, every), TextLine(fit(_about(fleet, chosen), width), TextStyle.CHOSEN)]
    room = height - len(top) - 1
    body, more = list[TextLine](), list[TextLine]()
    if about is not None:
        most = max(0, room - min(len(engines), _FEW + 1))  # with the heading
        body, more = list(detail(about, width)), list(extra(about, width))
        if len(body) > most:
            body = list(detail(about, width, misses=_MISSES))[:most]
    shown = _cut(engines, max(room - len(body), 2))
    more = more[: max(0, room - len(body) - len(shown))]
    return [*top, *body, *more, TextLine(""), *shown][:height]


def text(fleet: FleetView, width: int | None, every: float) -> str:
    """Return the state of all engines as text, for output without a live view.

    Args:
        width: maximum width of a line, in terminal cells; None for one line per heading and engine.
    """
    lines = [
        _title(fleet, width, every),
        *map(TextLine, wrap(printable(_about(fleet, None)), width, hanging=2)),
    ]
    if fleet.together is not None:
        lines += [*detail(fleet.together, width), *extra(fleet.together, width)]
    lines += [TextLine(""), *engine_list(fleet, width, None, whole=True)]
    return "".join(f"{line.text.rstrip()}\n" for line in lines)


def _title(fleet: FleetView, width: int | None, every: float) -> TextLine:
    answering = f"engines answering: {fleet.answering} of {len(fleet.engines)}"
    clock = time.strftime("%H:%M:%S", time.localtime(fleet.at))
    whole = f"kvferry top  {answering}, read every {every:g} s"
    if width is None:
        return TextLine(f"{whole}  {clock}", TextStyle.TITLE)
    room = width - len(clock) - 1
    heading = next(
        (each for each in (whole, f"kvferry top  {answering}", answering) if len(each) <= room), ""
    )
    return TextLine(fit(f"{heading:<{max(0, room)}} {clock}", width), TextStyle.TITLE)


def _about(fleet: FleetView, chosen: int | None) -> str:
    if chosen is not None:
        engine = fleet.engines[chosen]
        return f"{_named(engine)}{', ' if engine.model else ''}{engine.model}"
    models = sorted({engine.model for engine in fleet.engines if engine.model})
    return f"all engines{': ' if models else ''}{', '.join(models)}"


def engine_list(
    fleet: FleetView, width: int | None, chosen: int | None, *, whole: bool = False
) -> list[TextLine]:
    """Return the list of engines: a heading and one line per engine.

    Args:
        whole: True to show errors in full, in several lines if needed.
    """
    rows = [
        (_named(engine), *_cells(engine.figures, engine.started, fleet.at))
        for engine in fleet.engines
        if engine.figures is not None
    ]
    fitted = fit_table(COLUMNS, rows, width, tall=False)
    lines = [TextLine(line, TextStyle.HEAD) for line in fitted.head]
    # Engines that do not answer have no figures, but keep their place in the list.
    numbers = iter(fitted.rows)
    for place, engine in enumerate(fleet.engines):
        if engine.figures is None:
            lines += [TextLine(line, TextStyle.BAD) for line in _silent(engine, fleet.at, width, whole=whole)]
        else:
            look = TextStyle.CHOSEN if place == chosen else TextStyle.PLAIN
            lines += [TextLine(line, look) for line in next(numbers)]
    return lines


def _cut(lines: list[TextLine], room: int) -> list[TextLine]:
    """Shorten the list to `room` lines, at least 2. A last line counts the engines that are left out."""
    if len(lines) <= room:
        return lines
    head, *engines = lines
    # The user's choice stays, and then engines that do not answer.
    urgent = sorted(
        engines, key=lambda line: (line.look is not TextStyle.CHOSEN, line.look is not TextStyle.BAD)
    )
    left_out = urgent[max(0, room - 2) :]
    kept = [line for line in engines if not any(line is each for each in left_out)]
    return [head, *kept, TextLine(f"and {len(left_out)} more", TextStyle.HEAD)]


def _named(engine: EngineRow) -> str:
    role = f" {engine.role}" if engine.role else ""
    return f"{engine.name}{role}{'' if engine.ferry or engine.figures is None else ' (no kvferry)'}"


def _silent(engine: EngineRow, at: float, width: int | None, *, whole: bool) -> list[str]:
    if engine.silence is None:
        status = "asked, has not answered yet"
    else:
        since = time.strftime("%H:%M:%S", time.localtime(engine.silence.since))
        status = f"no answer since {since} ({format_age(at - engine.silence.since)}): {engine.silence.why}"
    if whole or width is None:
        return wrap(printable(f"{_named(engine)}  {status}"), width, hanging=2)
    return [fit(f"{shortened(_named(engine), max(_NAME, width - cell_len(status) - 2))}  {status}", width)]


def cached_share(tokens: Mapping[str, float]) -> float | None:
    """Return the share of prompt tokens, from 0 to 1, that were not computed; None without tokens.

    Args:
        tokens: prompt tokens by the origin of their KV: ``computed``, or where it was found.
    """
    total = sum(tokens.values())
    return 1 - tokens.get("computed", 0.0) / total if total else None


def _cells(of: Figures, started: float | None, at: float) -> Iterator[str]:
    rates, totals, levels = of.rates, of.totals, of.levels
    yield number(levels.running)
    yield number(levels.waiting)
    yield number(rates.prompt_tokens if rates else None)
    yield percent(cached_share(rates.tokens) if rates else None)
    yield "-" if rates is None else format_bytes(sum(source.load_bytes for source in rates.sources.values()))
    slowest = [source.load_seconds.p99 for source in totals.sources.values()]
    yield format_seconds(max(seen)) if (seen := [each for each in slowest if each is not None]) else "-"
    yield number(sum(totals.failed.values()))
    yield number(rates.generated_tokens if rates else None)
    yield percent(cached_share(totals.tokens))
    yield percent(max((usage.share for usage in levels.tiers.values()), default=None))
    yield number(totals.leases_expired)
    yield "-" if started is None else format_age(at - started)
