"""`kvferry bench tiers`: measure the speed of every tier, compared with the same bytes without kvferry."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvferry.common.units import format_bytes
from kvferry.tools.bench import file_tier, host_tier, object_tier
from kvferry.tools.bench.rank_chunks import CHUNK_TOKENS, RankPair, chunk_group
from kvferry.tools.bench.rounds import MoverRounds, TierSpeed, measure_cases
from kvferry.tools.measuring.rounds import MachineFacts, machine_facts
from kvferry.tools.models import ModelReading
from kvferry.tools.plan.side import EngineSide
from kvferry.tools.report import Column, Report

_CASE = (Column("tier", left=True), Column("direction", left=True))

SPEEDS = (
    *_CASE,
    Column("depth"),
    Column("speed", rank=1),
    Column("limit", rank=3),
    Column("ratio"),
    Column("range of ratio", rank=4),
    Column("target", rank=5),
    Column("reached", rank=2, left=True),
    Column("limited by", rank=6, left=True),
)

NOTES = (
    *_CASE,
    Column("gain over the least depth", left=True),
    Column("control, share of the limit", rank=1, left=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TiersJob:
    """The tiers that `kvferry bench tiers` measures, and the settings of the measurement."""

    reading: ModelReading
    # Engines (layout and block size) for the host tier, each measured separately.
    sides: tuple[EngineSide, ...]
    depths: tuple[int, ...]  # numbers of chunks in flight, or of threads for the host tier
    repeats: int
    path: Path  # existing folder for the file tier. The files created there are removed.
    url: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTiers:
    """The results of `kvferry bench tiers`, with one speed per tier, direction and depth."""

    job: TiersJob
    machine: MachineFacts
    chunk_tokens: int
    chunk_bytes: int
    speeds: tuple[TierSpeed, ...]


def measure(job: TiersJob, progress: Callable[[str], None]) -> MeasuredTiers:
    """Store and load chunks in every tier, and return the measured speeds.

    Raises:
        ConfigError: memory cannot be allocated, or the folder or URL cannot be used.
        TransferError: a chunk could not be stored or loaded, or a loaded chunk differs from the stored chunk.
    """
    group = chunk_group(job.reading)
    speeds: list[TierSpeed] = []
    # One after the other: each holds all chunks in memory three times.
    for side in job.sides:
        with RankPair(job.reading, side, max(job.depths)) as ranks, ExitStack() as stack:
            cases = host_tier.tier_cases(stack, ranks, job.depths)
            speeds += measure_cases(cases, job.repeats, _prefixed(progress, f"host tier, {side.layout}"))
            host_tier.verify_copies(cases, ranks)
    with ExitStack() as stack:
        cases = file_tier.tier_cases(stack, group, job.path, job.depths)
        speeds += measure_cases(cases, job.repeats, _prefixed(progress, "file tier"))
    if job.url is not None:
        with ExitStack() as stack:
            cases = object_tier.tier_cases(stack, group, job.url, job.depths)
            speeds += measure_cases(cases, job.repeats, _prefixed(progress, "object tier"))
    return MeasuredTiers(
        job=job,
        machine=machine_facts(),
        chunk_tokens=CHUNK_TOKENS,
        chunk_bytes=group.chunk_bytes,
        speeds=tuple(speeds),
    )


def _prefixed(progress: Callable[[str], None], where: str) -> Callable[[str], None]:
    return lambda text: progress(f"{where}: {text}")


def show(measured: MeasuredTiers, report: Report) -> None:
    """Print the results of `kvferry bench tiers`: the chunks, the machine, and two tables."""
    job, machine = measured.job, measured.machine
    report.heading(job.reading.cache.name)
    report.text(f"chunks of {measured.chunk_tokens} tokens, {format_bytes(measured.chunk_bytes)}")
    report.text(f"{machine.cores} cores, {machine.cpu}; median and range of {job.repeats} interleaved rounds")
    report.text()
    report.table(SPEEDS, [_speed_row(speed) for speed in measured.speeds])
    report.text()
    report.note("Limit: speed of the same bytes without kvferry. Ratio: kvferry's speed divided by it.")
    report.note("Depth: number of chunks in flight, or of threads for host memory.")
    report.text()
    report.table(NOTES, [*_notes(measured.speeds)])


def as_json(measured: MeasuredTiers) -> dict[str, Any]:
    """Return the results as values for JSON: seconds and bytes of every round, speeds and ratios."""
    job = measured.job
    return {
        "geometry": job.reading.cache.name,
        "machine": asdict(measured.machine),
        **{name: getattr(job, name) for name in ("depths", "repeats")},
        "engines": [{"layout": side.layout, "block_tokens": side.block_tokens} for side in job.sides],
        "path": str(job.path),
        "object": job.url,
        **{name: getattr(measured, name) for name in ("chunk_tokens", "chunk_bytes")},
        "speeds": [_speed_json(speed) for speed in measured.speeds],
    }


def _speed_json(speed: TierSpeed) -> dict[str, Any]:
    return {
        **asdict(speed),
        "limit": speed.limit.name,
        "gigabytes_per_second": {
            series.name: asdict(series.gigabytes_per_second)
            for series in (speed.ours, *speed.limits, *speed.controls)
        },
        "ratio": asdict(speed.ratio),
        "reached": speed.reached,
    }


def _speed_row(speed: TierSpeed) -> list[str]:
    ratio = speed.ratio
    return [
        speed.tier,
        speed.direction,
        str(speed.depth),
        _gigabytes(speed.ours),
        _gigabytes(speed.limit),
        f"{ratio.median:.2f}",
        f"{ratio.low:.2f}-{ratio.high:.2f}",
        f"{speed.target:.1f}",
        "yes" if speed.reached else "no",
        speed.limit.name,
    ]


def _notes(speeds: Sequence[TierSpeed]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a table that helps to explain the results, one per tier and direction.

    The first column shows kvferry's speed at each larger depth, as a multiple of its speed at the smallest.
    The second shows the speed of each control at the smallest depth, as a share of the limit's.
    """
    for kind in dict.fromkeys((speed.tier, speed.direction) for speed in speeds):
        first, *rest = sorted((s for s in speeds if (s.tier, s.direction) == kind), key=lambda s: s.depth)
        gains = [f"{one.depth}: {one.ours.speed_ratio(first.ours).median:.2f}x" for one in rest]
        controls = [f"{one.name}: {one.speed_ratio(first.limit).median:.2f}" for one in first.controls]
        yield *kind, "\n".join(gains), "\n".join(controls)


def _gigabytes(series: MoverRounds) -> str:
    return f"{series.gigabytes_per_second.median:.2f} GB/s"
