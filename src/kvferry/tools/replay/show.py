"""The outcome of a replay as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvferry.tools.replay.curve import CurvePoint
from kvferry.tools.replay.report import Outcome, TierOutcome
from kvferry.tools.replay.results import Times
from kvferry.tools.replay.settings import ReplaySettings
from kvferry.report import Report
from kvferry.table import Column
from kvferry.units import counted, format_age, format_bytes, format_count, format_seconds

# Length in characters of the bar for a hit rate of 100 %.
_BAR = 40


def show(found: Outcome, report: Report) -> None:
    """Print the outcome of a replay."""
    simulation, results = found.simulation, found.simulation.results
    model, settings = simulation.model, simulation.settings
    if not found.complete:
        report.text("Interrupted: these are the numbers of the requests so far.")
    span = results.last_arrival - results.first_arrival
    report.text(
        f"{counted(results.requests, 'request')} in {format_age(span)}, "
        f"{format_count(results.prompt_tokens)} prompt tokens; {model.name} in chunks of "
        f"{model.chunk_tokens:,} tokens, {engines(settings)}"
    )
    report.text()
    if found.tells_prefixes:
        _show_hits(found, report)
    else:
        report.heading("The trace cannot tell how many of the prompt tokens need not be computed")
        report.text("It has only lengths, and every prompt is taken as new.")
    report.text()
    report.heading("Chunks")
    report.table(_CHUNKS, list(_chunks(found)))
    if len(results.waits):
        report.text()
        report.heading("Time to the first token, without decoding")
        rows = [
            _wait("with the tiers", results.waits),
            _wait("without tiers", results.waits_without_tiers),
        ]
        report.table(_WAITS, rows)
    if found.curve:
        show_curve(found.curve, settings, report)


def engines(settings: ReplaySettings) -> str:
    """Return the number of engines and the prefix cache of each, as words."""
    pool = settings.pool.text
    return f"{counted(settings.engines, 'engine')}{', each' * (settings.engines > 1)} {pool}"


def _show_hits(found: Outcome, report: Report) -> None:
    results = found.simulation.results
    report.heading(
        f"Tiers save {results.tier_hit_rate:.1%} of the prompt tokens from being computed, the engine's own "
        f"prefix cache {results.local_hit_rate:.1%}"
        if found.simulation.settings.pool.blocks
        else f"Tiers save {results.tier_hit_rate:.1%} of the prompt tokens from being computed"
    )
    report.note(
        f"Together {results.hit_rate:.1%}, or {results.unit_hit_rate:.1%} of the trace's units of "
        f"{found.simulation.unit_tokens:,} tokens."
    )
    report.table(_PLACES, list(_places(found)), last_is_total=True)
    _show_groups(found, report)


_PLACES = Column("tokens from", left=True), Column("share"), Column("tokens", rank=1)


def _places(found: Outcome) -> Iterator[tuple[str, str, str]]:
    results = found.simulation.results
    rows = [(tier.name, tier.hit_tokens) for tier in found.tiers]
    if found.simulation.settings.pool.blocks:
        rows.insert(0, ("the engine's prefix cache", results.local_tokens))
    rows.append(("computed", results.prompt_tokens - results.hit_tokens))
    for name, tokens in rows:
        yield name, f"{tokens / max(results.prompt_tokens, 1):.1%}", format_count(tokens)


def _show_groups(found: Outcome, report: Report) -> None:
    model, results = found.simulation.model, found.simulation.results
    if len(model.groups) == 1:
        return
    report.text()
    report.heading("Hit rate of each KV cache group alone")
    prompt = max(results.prompt_tokens, 1)
    rows = [
        (group.label, f"{tokens / prompt:.1%}")
        for group, tokens in zip(model.groups, results.group_tokens, strict=True)
    ]
    report.table((Column("group", left=True), Column("share")), rows)
    lost = results.lost_tokens
    report.text(
        f"{format_count(lost)} tokens ({lost / prompt:.1%}) were computed although their full-attention "
        "KV was at hand, because no window or snapshot of recurrent state ended where it did."
    )


_CHUNKS = (
    Column("tier", left=True),
    Column("capacity"),
    Column("most used", rank=1),
    Column("read"),
    Column("written"),
    Column("evicted", rank=2),
    Column("chunks dropped", rank=3),
)


def _chunks(found: Outcome) -> Iterator[tuple[str, ...]]:
    for tier in found.tiers:
        counts = tier.counts
        yield (
            _name(tier),
            "unlimited" if tier.capacity_bytes is None else format_bytes(tier.capacity_bytes),
            format_bytes(counts.most_bytes),
            format_bytes(counts.read_bytes),
            format_bytes(counts.stored_bytes),
            format_bytes(counts.evicted_bytes),
            f"{counts.dropped:,}",
        )


def _name(tier: TierOutcome) -> str:
    return tier.name if tier.tiers == 1 else f"{tier.name}, {tier.tiers:,} of them"


_WAITS = (
    Column("time", left=True),
    Column("median"),
    Column("90 %", rank=1),
    Column("99 %"),
    Column("mean", rank=2),
)


def _wait(name: str, times: Times) -> tuple[str, ...]:
    return (
        name,
        *(format_seconds(times.quantile(share)) for share in (0.5, 0.9, 0.99)),
        format_seconds(times.mean),
    )


_CURVE = Column("capacity", left=True), Column("hit rate"), Column("as a bar", rank=1, left=True)


def show_curve(points: Sequence[CurvePoint], settings: ReplaySettings, report: Report) -> None:
    """Print the hit rate by capacity of host memory."""
    beside = ", with the engine's prefix cache" if settings.pool.blocks else " alone"
    report.text()
    report.heading(f"Hit rate by capacity of host memory{beside}")
    report.table(_CURVE, [_curve_row(point) for point in thinned(points, 16)])


def _curve_row(point: CurvePoint) -> tuple[str, str, str]:
    bar = "#" * round(point.hit_rate * _BAR)
    return format_bytes(point.capacity_bytes), f"{point.hit_rate:.1%}", bar


def thinned(points: Sequence[CurvePoint], most: int) -> list[CurvePoint]:
    """Return at most `most` points of a curve, evenly spaced, with the first and the last."""
    if len(points) <= most:
        return list(points)
    step = (len(points) - 1) / (most - 1)
    return [points[round(number * step)] for number in range(most)]
