"""Render the figures of one engine, or of all engines together, as lines of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from kvferry.common.text import Column, fit_table
from kvferry.common.units import format_bytes, format_seconds, plural
from kvferry.tools.top.figures import ActivityCounts, Figures, Latency, TierCounts, TierUsage
from kvferry.tools.top.layout import MARGIN, TextLine, TextStyle, arrange, number, percent, without_end

SOURCE = (
    Column("source", left=True, minimum=MARGIN - 2, least=MARGIN - 2),
    Column("asked/s", rank=1, minimum=8),
    Column("hit now", rank=2, minimum=7),
    Column("since start", rank=3, minimum=11),
    Column("under way", rank=4, minimum=9),
    Column("loaded/s", rank=5, minimum=9),
    Column("median", rank=6, minimum=6),
    Column("p99", rank=7, minimum=6),
)
CONNECTOR = (
    Column("connector", left=True, minimum=MARGIN - 2, least=MARGIN - 2),
    Column("asked/s", rank=1, minimum=8),
    Column("hit now", rank=2, minimum=7),
    Column("since start", rank=3, minimum=11),
    Column("under way", rank=4, minimum=9),
    Column("tokens/s", rank=5, minimum=9),
    Column("missed", rank=6, minimum=6),
    Column("failed", rank=7, minimum=6),
)
TIER = (
    Column("tier", left=True, minimum=MARGIN - 2, least=MARGIN - 2),
    Column("used", rank=1, minimum=7),
    Column("capacity", rank=2, minimum=8),
    Column("full", rank=3, minimum=3),
    Column("owed", rank=4, minimum=4),
    Column("read/s", rank=5, minimum=5),
    Column("p99", rank=6, minimum=7),
    Column("write/s", rank=7, minimum=6),
    Column("dropped", rank=8, minimum=6),
    Column("evicted", rank=9, minimum=6),
)


def detail(of: Figures, width: int | None, misses: int | None = None) -> Iterator[TextLine]:
    """Yield the lines about an engine, or about all engines combined, with the most important line first.

    Args:
        width: maximum width of a line, in terminal cells; None for no limit.
        misses: maximum number of lines that list the misses of sources by reason; None for no limit.
    """
    levels, rates = of.levels, of.rates
    yield from _item_lines("requests", _requests(of), width)
    yield from _item_lines("tokens/s", _tokens(rates), width)
    failed = (
        any(of.totals.failed.values())
        or of.totals.recomputed_tokens > 0
        or any(connector.failed for connector in of.totals.connectors.values())
    )
    yield from _item_lines(
        "failures", _failures(of), width, look=TextStyle.BAD if failed else TextStyle.PLAIN
    )
    if of.totals.connectors:
        yield from _table(CONNECTOR, [(name, *_connector(of, name)) for name in of.totals.connectors], width)
    if of.totals.sources:
        yield from _table(SOURCE, [(name, *_source(of, name)) for name in of.totals.sources], width)
    if levels.tiers:
        now = {} if rates is None else rates.tiers
        tiers = [
            (name, *_tier(usage, now.get(name), of.totals.tiers[name]))
            for name, usage in levels.tiers.items()
        ]
        yield from _table(TIER, tiers, width)
    yield from _item_lines("misses", _misses(of), width, at_most=misses)
    if of.totals.stages:
        yield from _item_lines("peers", _peers(of.totals), width)
    yield from _item_lines("leases", _leases(of), width)


def extra(of: Figures, width: int | None) -> Iterator[TextLine]:
    """Yield the less important lines, which are shown only if there is room on the screen."""
    moved = [f"{one.source} {one.group} {one.strategy} {format_bytes(one.size)}" for one in of.totals.moved]
    yield from _item_lines("moved", moved, width)
    for what in ("dropped", "missed"):
        reasons = {
            f"{name}: {reason}": n
            for name, tier in of.totals.tiers.items()
            for reason, n in (tier.dropped_chunks if what == "dropped" else tier.missed_chunks).items()
        }
        yield from _item_lines(what, (f"{reason} {number(n)}" for reason, n in reasons.items()), width)


def _table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None) -> Iterator[TextLine]:
    fitted = fit_table(columns, rows, width, tall=False)
    yield from (TextLine(line, TextStyle.HEAD) for line in fitted.head)
    yield from (TextLine(line) for row in fitted.rows for line in row)


def _item_lines(
    heading: str,
    items: Iterator[str] | list[str],
    width: int | None,
    at_most: int | None = None,
    look: TextStyle = TextStyle.PLAIN,
) -> Iterator[TextLine]:
    lines = list(arrange(heading, items, width))
    for place, line in enumerate(lines[:at_most]):
        # Lines are left out behind the last one, which says so.
        last = width is not None and place + 1 == at_most and len(lines) > at_most
        yield TextLine(without_end(line, width) if last and width is not None else line, look)


def _requests(of: Figures) -> Iterator[str]:
    yield f"{number(of.levels.running)} running"
    yield f"{number(of.levels.waiting)} waiting"
    yield f"cache {percent(of.levels.cache_usage)}"
    first = _recent(of, lambda counts: counts.first_token_seconds)
    if first.median is not None:
        yield f"first token {format_seconds(first.median)}, p99 {_duration(first.p99)}"


def _tokens(rates: ActivityCounts | None) -> Iterator[str]:
    if rates is None:
        yield "one reading so far"
        return
    yield f"answers {number(rates.generated_tokens)}"
    yield f"prompts {number(rates.prompt_tokens)}{':' if rates.tokens else ''}"
    yield from (f"{name} {number(n)}" for name, n in rates.tokens.items())


def _source(of: Figures, name: str) -> Iterator[str]:
    total = of.totals.sources[name]
    now = None if of.rates is None else of.rates.sources.get(name)
    seconds = _recent(
        of, lambda counts: source.load_seconds if (source := counts.sources.get(name)) else None
    )
    yield number(None if now is None else now.queries)
    yield percent(None if now is None else now.hit_rate)
    yield percent(total.hit_rate)
    yield number(of.levels.pending_loads.get(name, 0.0))
    yield _size(None if now is None else now.load_bytes)
    yield _duration(seconds.median)
    yield _duration(seconds.p99)


def _connector(of: Figures, name: str) -> Iterator[str]:
    total = of.totals.connectors[name]
    now = None if of.rates is None else of.rates.connectors.get(name)
    yield number(None if now is None else now.queries)
    yield percent(None if now is None else now.hit_rate)
    yield percent(total.hit_rate)
    yield number(of.levels.pending_connectors.get(name, 0.0))
    yield number(None if now is None else now.hit_tokens)
    yield number(total.misses)
    yield number(total.failed)


def _tier(usage: TierUsage, now: TierCounts | None, total: TierCounts) -> Iterator[str]:
    yield _size(usage.used)
    yield _size(usage.capacity)
    yield percent(usage.share) if usage.capacity else "-"
    yield number(usage.owed_chunks)
    yield number(None if now is None else now.fetched_chunks)
    yield _duration(total.fetch_seconds.p99)
    yield number(None if now is None else now.stored_chunks)
    yield number(sum(total.dropped_chunks.values()))
    yield number(total.evicted_chunks)


def _misses(of: Figures) -> Iterator[str]:
    recent = () if of.rates is None else of.rates.misses
    now = {(one.source, one.reason, one.group): one.count for one in recent}
    for one in of.totals.misses:
        group = f" ({one.group})" if one.group else ""
        rate = now.get((one.source, one.reason, one.group), 0.0)
        yield f"{one.source} {one.reason}{group} {number(one.count)}{_added(rate)}"
    if not of.totals.misses:
        yield "none"


def _peers(totals: ActivityCounts) -> Iterator[str]:
    # Stages of another version come last, by name.
    for stage in sorted(totals.stages, key=lambda name: (*(name != each for each in _STAGES), name)):
        seconds = totals.stages[stage]
        yield f"{stage} {_duration(seconds.median)}, p99 {_duration(seconds.p99)}"
    if totals.pages_per_descriptor is not None and totals.descriptor_bytes is not None:
        pages = number(totals.pages_per_descriptor)
        noun = plural(totals.pages_per_descriptor, "page")
        yield f"descriptors of {format_bytes(totals.descriptor_bytes)}, {pages} {noun} each"


# In the order of a load.
_STAGES = ("plan", "read", "check")


def _failures(of: Figures) -> Iterator[str]:
    now: Mapping[str, float] = {} if of.rates is None else of.rates.failed
    for outcome, n in of.totals.failed.items():
        yield f"loads {outcome} {number(n)}{_added(now.get(outcome, 0.0))}"
    rate = 0.0 if of.rates is None else of.rates.recomputed_tokens
    yield f"recomputed tokens {number(of.totals.recomputed_tokens)}{_added(rate)}"
    yield f"late blocks {number(of.levels.late_blocks)}"


def _leases(of: Figures) -> Iterator[str]:
    totals, rates = of.totals, of.rates
    yield f"{number(of.levels.leases)} held"
    yield f"{number(totals.leases_granted)} granted{_added(rates.leases_granted if rates else 0.0)}"
    yield f"{number(totals.leases_released)} released"
    yield f"{number(totals.leases_expired)} expired{_added(rates.leases_expired if rates else 0.0)}"


def _recent(of: Figures, seconds: Callable[[ActivityCounts], Latency | None]) -> Latency:
    """Return a latency as measured between the last two readings, or since the engine's start."""
    now = None if of.rates is None else seconds(of.rates)
    # Without samples between the two readings, older ones say more than a dash.
    if now is not None and now.median is not None:
        return now
    return seconds(of.totals) or Latency(None, None)


def _added(rate: float) -> str:
    return f" +{number(rate)}/s" if rate else ""


def _duration(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)


def _size(count: float | None) -> str:
    return "-" if count is None else format_bytes(count)
