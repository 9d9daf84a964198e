"""The outcome of a replay, and the answer to a sizing question, as text and as values for JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from statistics import median_low
from typing import Any, TypeVar

from kvferry.common.units import counted, format_age, format_bytes, format_count, format_seconds
from kvferry.tiers import FLEET
from kvferry.tools.replay.clients import (
    HintWorth,
    TenantOutcome,
    show_tenants,
    show_worth,
    tenants_as_json,
    tenants_of,
    worth_as_json,
)
from kvferry.tools.replay.curve import CurvePoint, curve_as_json
from kvferry.tools.replay.lookup import TierCounts
from kvferry.tools.replay.replayed import Replayed, TierOutcome, Times
from kvferry.tools.replay.settings import ReplaySettings
from kvferry.tools.replay.sizing import Sizing
from kvferry.tools.replay.trace.base import ONLY_LENGTHS
from kvferry.tools.replay.wear import TierWear, wear_as_json
from kvferry.tools.report import Column, Report

_Number = TypeVar("_Number", int, float)

# Length in characters of the bar for a hit rate of 100 %.
_BAR = 40
# Share of the prompt tokens below which tiers are not worth it.
_LITTLE = 0.05
_SHORT_LIVED_YEARS = 3.0

_PLACES = Column("tokens from", left=True), Column("share"), Column("tokens", rank=1)
_GROUPS = Column("group", left=True), Column("share")
_CHUNKS = (
    Column("tier", left=True),
    Column("capacity"),
    Column("most used", rank=1),
    Column("read"),
    Column("written"),
    Column("evicted", rank=2),
    Column("chunks dropped", rank=3),
)
_WAITS = (
    Column("time", left=True),
    Column("median"),
    Column("90 %", rank=1),
    Column("99 %"),
    Column("mean", rank=2),
)
_ENGINES = (
    Column("by engine", left=True),
    Column("least"),
    Column("median", rank=1),
    Column("most"),
)
_WEAR = (
    Column("written to", left=True),
    Column("chunks", left=True),
    Column("per day"),
    Column("declined", rank=2),
    Column("disk lasts"),
    Column("hit rate"),
)
_CURVE = Column("capacity", left=True), Column("hit rate"), Column("as a bar", rank=1, left=True)
_CHOICES = (
    Column("retention", left=True),
    Column("tokens per step"),
    Column("hit rate"),
    Column("stored", rank=1),
)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a replay that has ended or was interrupted."""

    replayed: Replayed
    trace: str
    complete: bool
    curve: tuple[CurvePoint, ...] = ()  # hit rate by capacity of host memory; empty if it was not computed
    wear: tuple[TierWear, ...] = ()  # of each tier in storage; with an admission filter also without it
    without_hints: Replayed | None = None  # the same replay without hints, if there are any
    tells_prefixes: bool = True  # False if the trace has only lengths, so that its hit rate means nothing

    @cached_property
    def worth(self) -> HintWorth | None:
        return None if self.without_hints is None else HintWorth(self.replayed, self.without_hints)

    @cached_property
    def tenants(self) -> tuple[TenantOutcome, ...]:
        return tenants_of(self.replayed, self.without_hints)


def show(found: Outcome, report: Report) -> None:
    """Print the outcome of a replay."""
    replayed, results = found.replayed, found.replayed.results
    model, settings = replayed.model, replayed.settings
    if not found.complete:
        report.text("Interrupted: these are the numbers of the requests so far.")
    each = ", each" * (settings.engines > 1)
    report.text(
        f"{counted(results.requests, 'request')} in {format_age(results.seconds)}, "
        f"{format_count(results.prompt_tokens)} prompt tokens; {model.name} in chunks of "
        f"{model.chunk_tokens:,} tokens, {counted(settings.engines, 'engine')}{each} {settings.pool.text}"
    )
    report.text()
    if found.tells_prefixes:
        _show_hits(found, report)
    else:
        report.heading("The trace cannot tell how many of the prompt tokens need not be computed")
        report.text("It has only lengths, and every prompt is taken as new.")
    if found.worth is not None:
        report.text()
        show_worth(found.worth, report)
    report.text()
    report.heading("Chunks")
    report.table(_CHUNKS, [_chunks(tier) for tier in found.replayed.tiers])
    if settings.engines > 1:
        _show_engines(found, report)
    if found.tenants and found.tells_prefixes:
        report.text()
        show_tenants(found.tenants, report)
    if len(results.waits):
        report.text()
        _show_waits(found, report)
    if found.wear:
        report.text()
        _show_wear(found, report)
    if found.curve:
        show_curve(found.curve, settings, report)


def _show_waits(found: Outcome, report: Report) -> None:
    results = found.replayed.results
    report.heading("Time to the first token, without decoding")
    waits = [("with the tiers", results.waits), ("without tiers", results.waits_without_tiers)]
    if found.without_hints is not None:
        waits.insert(1, ("without hints", found.without_hints.results.waits))
    rows = []
    for name, times in filter(itemgetter(1), waits):
        seconds = [*(times.quantile(share) for share in (0.5, 0.9, 0.99)), times.mean]
        rows.append((name, *map(format_seconds, seconds)))
    report.table(_WAITS, rows)


def _show_wear(found: Outcome, report: Report) -> None:
    report.heading("Wear")
    report.table(
        _WEAR,
        [
            (
                row.name,
                "all" if row.admits_all else "admitted",
                "" if row.written_per_day is None else format_bytes(row.written_per_day),
                f"{row.declined:,}",
                "" if row.years is None else lifetime(row.years),
                f"{row.hit_rate:.1%}" if found.tells_prefixes else "",
            )
            for row in found.wear
        ],
    )
    if any(tier.tiers > 1 for tier in found.replayed.tiers):
        report.text("What is written is that of one tier, on average.")


def lifetime(years: float) -> str:
    """Format the time that a disk lasts.

    >>> lifetime(2.34), lifetime(0.1)
    ('2.3 years', '36 days')
    """
    return f"{years:.1f} years" if years >= 1 else f"{years * 365:.0f} days"


def _show_hits(found: Outcome, report: Report) -> None:
    replayed, results = found.replayed, found.replayed.results
    has_own, prompt = replayed.settings.pool.blocks > 0, max(results.prompt_tokens, 1)
    own = f", the engine's own prefix cache {results.local_hit_rate:.1%}" * has_own
    report.heading(f"Tiers save {results.tier_hit_rate:.1%} of the prompt tokens from being computed{own}")
    report.note(
        f"Together {results.hit_rate:.1%}, or {results.unit_hit_rate:.1%} of the trace's units of "
        f"{replayed.unit_tokens:,} tokens."
    )
    places = [("the engine's prefix cache", results.local_tokens)] * has_own
    places += [(tier.name, tier.hit_tokens) for tier in found.replayed.tiers]
    places.append(("computed", results.prompt_tokens - results.hit_tokens))
    rows = [(name, f"{tokens / prompt:.1%}", format_count(tokens)) for name, tokens in places]
    report.table(_PLACES, rows, last_is_total=True)
    groups = replayed.model.groups
    if len(groups) == 1:
        return
    report.text()
    report.heading("Hit rate of each KV cache group alone")
    alone = zip(groups, results.group_tokens, strict=True)
    report.table(_GROUPS, [(group.label, f"{tokens / prompt:.1%}") for group, tokens in alone])
    lost = results.lost_tokens
    report.text(
        f"{format_count(lost)} tokens ({lost / prompt:.1%}) were computed although their full-attention "
        "KV was at hand, because no window or snapshot of recurrent state ended where it did."
    )


def _show_engines(found: Outcome, report: Report) -> None:
    """Print how evenly requests, hits and reads are spread over the engines."""
    engines = found.replayed.engines
    rows = [_spread("requests", [one.requests for one in engines], format_count)]
    if found.tells_prefixes:
        rates = [one.hit_tokens / max(one.prompt_tokens, 1) for one in engines]
        rows.append(_spread("tokens not computed", rates, "{:.1%}".format))
    if any(tier.kind == FLEET for tier in found.replayed.settings.tiers):
        rows.append(_spread("read from others", [one.read_bytes for one in engines], format_bytes))
        rows.append(_spread("others read", [one.sent_bytes for one in engines], format_bytes))
    report.text()
    report.table(_ENGINES, rows)


def _spread(name: str, each: Sequence[_Number], text: Callable[[_Number], str]) -> tuple[str, ...]:
    return name, text(min(each)), text(median_low(each)), text(max(each))


def _chunks(tier: TierOutcome) -> tuple[str, ...]:
    counts = tier.counts
    if tier.capacity_bytes == 0:
        return tier.name, "", "", format_bytes(counts.read_bytes), "", "", ""
    return (
        tier.name if tier.tiers == 1 else f"{tier.name}, {tier.tiers:,} of them",
        "unlimited" if tier.capacity_bytes is None else format_bytes(tier.capacity_bytes),
        format_bytes(counts.most_bytes),
        format_bytes(counts.read_bytes),
        format_bytes(counts.stored_bytes),
        format_bytes(counts.evicted_bytes),
        f"{counts.dropped:,}",
    )


def show_curve(points: Sequence[CurvePoint], settings: ReplaySettings, report: Report) -> None:
    """Print the hit rate by capacity of host memory."""
    beside = ", with the engine's prefix cache" if settings.pool.blocks else " alone"
    report.text()
    report.heading(f"Hit rate by capacity of host memory{beside}")
    rows = [
        (
            format_bytes(point.capacity_bytes),
            f"{point.hit_rate:.1%}",
            "" if point.hit_rate_without_hints is None else f"{point.hit_rate_without_hints:.1%}",
            "#" * round(point.hit_rate * _BAR),
        )
        for point in thinned(points, 16)
    ]
    if settings.hints is None:
        report.table(_CURVE, [(capacity, rate, bar) for capacity, rate, _, bar in rows])
    else:
        report.table((*_CURVE[:2], Column("without hints"), _CURVE[2]), rows)


def thinned(points: Sequence[CurvePoint], most: int) -> list[CurvePoint]:
    """Return at most `most` points of a curve, evenly spaced, with the first and the last."""
    if len(points) <= most:
        return list(points)
    step = (len(points) - 1) / (most - 1)
    return [points[round(number * step)] for number in range(most)]


def show_size(found: Sizing, report: Report) -> None:
    """Print the answer to a sizing question."""
    report.heading(answer(found))
    for sentence in sentences(found):
        report.text(sentence)
    if found.choices:
        report.text()
        report.heading("Engine settings, with unlimited memory")
        rows = [
            (
                "None" if one.retention is None else f"{one.retention:,}",
                f"{one.step_tokens:,}",
                f"{one.hit_rate:.1%}",
                format_bytes(one.stored_bytes),
            )
            for one in found.choices
        ]
        report.table(_CHOICES, rows)
    show_curve(found.curve, found.ceiling.settings, report)


def answer(found: Sizing) -> str:
    """Return the answer in one sentence with a number."""
    target, best = found.question.target, found.ceiling.results.hit_rate
    if found.enough == 0:
        return (
            f"No tier is needed for {target:.0%}: the engine's own prefix cache reaches "
            f"{found.ceiling.results.local_hit_rate:.1%}; unlimited memory reaches {best:.1%}."
        )
    if found.enough is None:
        return (
            f"No capacity reaches {target:.0%}: with unlimited memory, {best:.1%} of the prompt tokens need "
            "not be computed."
        )
    too_little = f" ({format_bytes(found.too_little)} do not)" if found.too_little else ""
    return (
        f"{format_bytes(found.enough)} of host memory, or as much disk, reach {target:.0%}{too_little}; "
        f"unlimited memory reaches {best:.1%}."
    )


def sentences(found: Sizing) -> Iterator[str]:
    """Yield further sentences: the engine, the disk, its wear, and whether tiers are worth it."""
    results, pool = found.ceiling.results, found.ceiling.settings.pool
    alone = f", which has {results.local_hit_rate:.1%} of the prompt tokens" if pool.blocks else ""
    yield f"This is for one engine {pool.text}{alone}."
    if found.with_disk is not None:
        host = found.with_disk.settings.tiers[0].capacity_bytes
        rate = found.with_disk.results.hit_rate
        yield f"With {format_bytes(host)} of host memory in front of such a disk, the hit rate is {rate:.1%}."
    if (years := found.disk_years) is not None:
        short = " Choose a larger or a more enduring one." if years < _SHORT_LIVED_YEARS else ""
        yield f"The engine writes {format_bytes(found.written_per_second)} per second to the disk."
        writes = found.question.disk_writes_per_day
        daily = "1 full write" if writes == 1 else f"{writes:g} full writes"
        yield f"A disk of this size that endures {daily} per day for 5 years lasts {lifetime(years)}.{short}"
    if (speed := found.break_even_bytes_per_second) is not None:
        yield (
            f"Loading is faster than computing from tiers that deliver more than {speed / 1e9:.1f} GB/s "
            f"({format_bytes(found.bytes_per_token)} per token)."
        )
    saved, prompt = format_count(sum(results.tier_tokens)), format_count(results.prompt_tokens)
    if results.hit_rate < _LITTLE:
        yield "Tiers are not worth it on this trace: few prompts share a prefix with an earlier one."
    elif results.tier_hit_rate < _LITTLE:
        yield (
            f"Tiers are not worth it on this trace: at best they add {results.tier_hit_rate:.1%} of the "
            "prompt tokens to those that the engine has."
        )
    else:
        yield f"At best, tiers save the computation of {saved} of {prompt} tokens."
    if results.lost_tokens > results.prompt_tokens * _LITTLE:
        yield (
            f"{results.lost_tokens / results.prompt_tokens:.1%} of the tokens are computed only because no "
            "snapshot of recurrent state ends where prompts part; see the engine settings below."
        )


def as_json(found: Outcome) -> dict[str, Any]:
    """Return an outcome as values that can be written as JSON. docs/replay.md explains every key.

    Sizes are in bytes, times in seconds, lengths in tokens, and rates are shares from 0 to 1. Hits are None
    if the trace has only lengths.
    """
    replayed = found.replayed
    results, settings = replayed.results, replayed.settings
    prompt, known = max(results.prompt_tokens, 1), found.tells_prefixes

    # With lengths alone every prompt looks new, and a hit rate of 0 would be wrong.
    def told(value: float) -> float | None:
        return value if known else None

    labels, waits = [group.label for group in replayed.model.groups], None
    if len(results.waits):
        waits = {
            name: _quantiles(times) if times else None
            for name, times in (("with_tiers", results.waits), ("without_tiers", results.waits_without_tiers))
        }
    return {
        "trace": found.trace,
        "unit_tokens": replayed.unit_tokens,
        "complete": found.complete,
        "why_no_hit_rate": None if known else f"the trace {ONLY_LENGTHS}",
        "model": replayed.model.name,
        "chunk_tokens": replayed.model.chunk_tokens,
        "engines": settings.engines,
        "engine_blocks": settings.pool.blocks,
        "engine_blocks_source": settings.pool.source,
        "policy": settings.policy,
        "route": settings.route,
        "requests": results.requests,
        "seconds": results.seconds,
        "prompt_tokens": results.prompt_tokens,
        "output_tokens": results.output_tokens,
        "hit_rate": told(results.hit_rate),
        "unit_hit_rate": told(results.unit_hit_rate),
        "hit_tokens": told(results.hit_tokens),
        "computed_tokens": told(results.prompt_tokens - results.hit_tokens),
        "local_tokens": told(results.local_tokens),
        "lost_tokens": told(results.lost_tokens),
        "tiers": [
            {
                "name": one.name,
                "capacity_bytes": one.capacity_bytes,
                "tiers": one.tiers,
                **_counts(one.counts),
                "groups": [
                    {"label": label, **_counts(counts)}
                    for label, counts in zip(labels, one.group_counts, strict=True)
                ],
                "hit_tokens": told(one.hit_tokens),
                "hit_rate": told(one.hit_tokens / prompt),
            }
            for one in found.replayed.tiers
        ],
        "groups": [
            {"label": label, "hit_rate": told(tokens / prompt)}
            for label, tokens in zip(labels, results.group_tokens, strict=True)
        ],
        "by_engine": [
            {
                "requests": one.requests,
                "prompt_tokens": one.prompt_tokens,
                "hit_tokens": told(one.hit_tokens),
                "read_bytes": one.read_bytes,
                "sent_bytes": one.sent_bytes,
            }
            for one in replayed.engines
        ],
        "by_tenant": tenants_as_json(found.tenants) if known else [],
        "hints": worth_as_json(found.worth),
        "wear": wear_as_json(found.wear),
        "time_to_first_token": waits,
        "curve": curve_as_json(found.curve),
    }


def _quantiles(times: Times) -> dict[str, float]:
    return {"mean": times.mean, **{f"p{share}": times.quantile(share / 100) for share in (50, 90, 99)}}


def _counts(counts: TierCounts) -> dict[str, int]:
    return {name: getattr(counts, name) for name in TierCounts.__slots__}


def size_as_json(found: Sizing) -> dict[str, Any]:
    """Return the answer as values that can be written as JSON. docs/replay.md explains every key."""
    disk = found.with_disk
    return {
        "answer": answer(found),
        "target_hit": found.question.target,
        "model": found.model.name,
        "requests": found.ceiling.results.requests,
        "prompt_tokens": found.ceiling.results.prompt_tokens,
        "engine_blocks": found.ceiling.settings.pool.blocks,
        "engine_blocks_source": found.ceiling.settings.pool.source,
        "engine_hit_rate": found.ceiling.results.local_hit_rate,
        "unlimited_hit_rate": found.ceiling.results.hit_rate,
        "lost_tokens": found.ceiling.results.lost_tokens,
        "capacity_bytes": found.enough,
        "too_little_bytes": found.too_little,
        "bytes_per_token": found.bytes_per_token,
        "host_bytes": disk.settings.tiers[0].capacity_bytes if disk else None,
        "disk_hit_rate": disk.results.hit_rate if disk else None,
        "disk_written_bytes_per_second": found.written_per_second,
        "disk_years": found.disk_years,
        "break_even_bytes_per_second": found.break_even_bytes_per_second,
        "engine_settings": [
            {
                "max_num_batched_tokens": one.step_tokens,
                "prefix_cache_retention_interval": one.retention,
                "hit_rate": one.hit_rate,
                "stored_bytes": one.stored_bytes,
            }
            for one in found.choices
        ],
        "curve": curve_as_json(found.curve),
    }
