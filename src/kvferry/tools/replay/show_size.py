"""The answer to a sizing question as sentences, a table and a curve."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvferry.tools.replay.curve import curve_as_json
from kvferry.tools.replay.show import show_curve
from kvferry.tools.replay.sizing import EngineChoice, Sizing
from kvferry.report import Report
from kvferry.table import Column
from kvferry.units import format_bytes, format_count

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
