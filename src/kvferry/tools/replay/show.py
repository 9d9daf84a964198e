"""The outcome of a replay as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvferry.common.text import Column, Report
from kvferry.common.units import counted, format_age, format_bytes, format_count, format_seconds
from kvferry.tools.replay.curve import CurvePoint, curve_as_json
from kvferry.tools.replay.report import Outcome, TierOutcome
from kvferry.tools.replay.settings import ReplaySettings
from kvferry.tools.replay.simulation import Times
from kvferry.tools.replay.sizing import EngineChoice, Sizing

# Length in characters of the bar for a hit rate of 100 %.
_BAR = 40


def show(found: Outcome, report: Report) -> None:
    """Print the outcome of a replay."""
    simulation, results = found.simulation, found.simulation.results
    model, settings = simulation.model, simulation.settings
    if not found.complete:
        report.text("Interrupted: these are the numbers of the requests so far.")
    report.text(
        f"{counted(results.requests, 'request')} in {format_age(results.seconds)}, "
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


# Share of the prompt tokens below which tiers are not worth it.
_LITTLE = 0.05
_SHORT_LIVED_YEARS = 3.0


def show_size(found: Sizing, report: Report) -> None:
    """Print the answer to a sizing question."""
    report.heading(answer(found))
    for sentence in sentences(found):
        report.text(sentence)
    if found.choices:
        report.text()
        report.heading("Engine settings, with unlimited memory")
        report.table(_CHOICES, [_choice(one) for one in found.choices])
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
        daily = _times(found.question.disk_writes_per_day)
        yield f"A disk of this size that endures {daily} per day for 5 years lasts {_lifetime(years)}.{short}"
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


def _times(count: float) -> str:
    return "1 full write" if count == 1 else f"{count:g} full writes"


def _lifetime(years: float) -> str:
    return f"{years:.1f} years" if years >= 1 else f"{years * 365:.0f} days"


_CHOICES = (
    Column("retention", left=True),
    Column("tokens per step"),
    Column("hit rate"),
    Column("stored", rank=1),
)


def _choice(one: EngineChoice) -> tuple[str, ...]:
    retention = "None" if one.retention is None else f"{one.retention:,}"
    return retention, f"{one.step_tokens:,}", f"{one.hit_rate:.1%}", format_bytes(one.stored_bytes)


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
