"""Render the figures of one engine, or of all engines together, as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvferry.common.units import format_bytes, format_seconds, plural
from kvferry.tiers import HOST
from kvferry.tools.report import Column, fit_table
from kvferry.tools.top.figures import ActivityCounts, Figures
from kvferry.tools.top.layout import MARGIN, TextLine, TextStyle, arrange, number, percent, without_end


def _named(heading: str) -> Column:
    return Column(heading, left=True, minimum=MARGIN - 2, least=MARGIN - 2)


_ASKED = (
    Column("asked/s", rank=1, minimum=8),
    Column("hit now", rank=2, minimum=7),
    Column("since start", rank=3, minimum=11),
    Column("under way", rank=4, minimum=9),
)
# Of a load from a peer, in their order.
_STAGES = ("plan", "read", "check")
SOURCE = (
    _named("source"),
    *_ASKED,
    Column("loaded/s", rank=5, minimum=9),
    Column("median", rank=6, minimum=6),
    Column("p99", rank=7, minimum=6),
)
CONNECTOR = (
    _named("connector"),
    *_ASKED,
    Column("tokens/s", rank=5, minimum=9),
    Column("missed", rank=6, minimum=6),
    Column("failed", rank=7, minimum=6),
)
TIER = (
    _named("tier"),
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
TENANT = (
    _named("tenant"),
    Column("tokens/s", rank=1, minimum=8),
    Column("hit now", rank=2, minimum=7),
    Column("since start", rank=3, minimum=11),
    Column("memory", rank=4, minimum=7),
    Column("storage", rank=5, minimum=7),
    Column("evicted", rank=6, minimum=7),
)


def detail(of: Figures, width: int | None, misses: int | None = None) -> Iterator[TextLine]:
    """Yield the lines about an engine, or about all engines combined, with the most important line first.

    Args:
        width: maximum width of a line, in terminal cells; None for no limit.
        misses: maximum number of lines that list the misses of sources by reason; None for no limit.
    """
    yield from _item_lines("requests", _requests(of), width)
    yield from _item_lines("tokens/s", _tokens(of.rates), width)
    failed = (
        any(of.totals.failed.values())
        or of.totals.recomputed_tokens > 0
        or any(connector.failed for connector in of.totals.connectors.values())
    )
    look = TextStyle.BAD if failed else TextStyle.PLAIN
    yield from _item_lines("failures", _failures(of), width, look=look)
    yield from _table(CONNECTOR, [(name, *_connector(of, name)) for name in of.totals.connectors], width)
    yield from _table(SOURCE, [(name, *_source(of, name)) for name in of.totals.sources], width)
    yield from _table(TIER, [(name, *_tier(of, name)) for name in of.levels.tiers], width)
    yield from _table(TENANT, [(name, *_tenant(of, name)) for name in of.totals.tenants], width)
    yield from _item_lines("misses", _misses(of), width, at_most=misses)
    if of.totals.stages:
        yield from _item_lines("peers", _peers(of.totals), width)
    yield from _item_lines("leases", _leases(of), width)


def extra(of: Figures, width: int | None) -> Iterator[TextLine]:
    """Yield the less important lines, which are shown only if there is room on the screen."""
    moved = [f"{one.source} {one.group} {one.strategy} {format_bytes(one.size)}" for one in of.totals.moved]
    yield from _item_lines("moved", moved, width)
    tiers = of.totals.tiers.items()
    for what, counts in (
        ("dropped", {name: tier.dropped_chunks for name, tier in tiers}),
        ("declined", {name: tier.declined_chunks for name, tier in tiers}),
        ("missed", {name: tier.missed_chunks for name, tier in tiers}),
    ):
        reasons = [f"{name}: {why} {number(n)}" for name, each in counts.items() for why, n in each.items()]
        yield from _item_lines(what, reasons, width)


def _table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None) -> Iterator[TextLine]:
    if not rows:
        return
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
    first = of.totals.first_token_seconds
    # Without samples between the two readings, older ones say more than a dash.
    if of.rates and of.rates.first_token_seconds.median is not None:
        first = of.rates.first_token_seconds
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
    now = of.rates.sources.get(name) if of.rates else None
    seconds = now.load_seconds if now and now.load_seconds.median is not None else total.load_seconds
    yield number(now.queries if now else None)
    yield percent(now.hit_rate if now else None)
    yield percent(total.hit_rate)
    yield number(of.levels.pending_loads.get(name, 0.0))
    yield _size(now.load_bytes if now else None)
    yield _duration(seconds.median)
    yield _duration(seconds.p99)


def _connector(of: Figures, name: str) -> Iterator[str]:
    total = of.totals.connectors[name]
    now = of.rates.connectors.get(name) if of.rates else None
    yield number(now.queries if now else None)
    yield percent(now.hit_rate if now else None)
    yield percent(total.hit_rate)
    yield number(of.levels.pending_connectors.get(name, 0.0))
    yield number(now.hit_tokens if now else None)
    yield number(total.misses)
    yield number(total.failed)


def _tier(of: Figures, name: str) -> Iterator[str]:
    usage, total = of.levels.tiers[name], of.totals.tiers[name]
    now = of.rates.tiers.get(name) if of.rates else None
    yield _size(usage.used)
    yield _size(usage.capacity)
    yield percent(usage.share) if usage.capacity else "-"
    yield number(usage.owed_chunks)
    yield number(now.fetched_chunks if now else None)
    yield _duration(total.fetch_seconds.p99)
    yield number(now.stored_chunks if now else None)
    yield number(sum(total.dropped_chunks.values()))
    yield number(total.evicted_chunks)


def _tenant(of: Figures, name: str) -> Iterator[str]:
    total = of.totals.tenants[name]
    now = of.rates.tenants.get(name) if of.rates else None
    yield number(now.prompt_tokens if now else None)
    yield percent(now.hit_rate if now else None)
    yield percent(total.hit_rate)
    used = dict(of.levels.tenants.get(name, {}))
    yield _size(used.pop(HOST, None))
    yield _size(sum(used.values()) if used else None)
    yield number(sum(total.evicted_chunks.values()))


def _misses(of: Figures) -> Iterator[str]:
    now = {(one.source, one.reason, one.group): one.count for one in (of.rates.misses if of.rates else ())}
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


def _failures(of: Figures) -> Iterator[str]:
    now: Mapping[str, float] = of.rates.failed if of.rates else {}
    for outcome, n in of.totals.failed.items():
        yield f"loads {outcome} {number(n)}{_added(now.get(outcome, 0.0))}"
    rate = of.rates.recomputed_tokens if of.rates else None
    yield f"recomputed tokens {number(of.totals.recomputed_tokens)}{_added(rate)}"
    yield f"late blocks {number(of.levels.late_blocks)}"


def _leases(of: Figures) -> Iterator[str]:
    totals, rates = of.totals, of.rates
    yield f"{number(of.levels.leases)} held"
    yield f"{number(totals.leases_granted)} granted{_added(rates.leases_granted if rates else None)}"
    yield f"{number(totals.leases_released)} released"
    yield f"{number(totals.leases_expired)} expired{_added(rates.leases_expired if rates else None)}"


def _added(rate: float | None) -> str:
    return f" +{number(rate)}/s" if rate else ""


def _duration(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)


def _size(count: float | None) -> str:
    return "-" if count is None else format_bytes(count)
