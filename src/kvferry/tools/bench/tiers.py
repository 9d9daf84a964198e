"""`kvferry bench tiers`: measure the speed of every tier, compared with the same bytes without kvferry."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvferry.tools.bench import file_tier, host_tier, object_tier
from kvferry.tools.bench.rank_chunks import CHUNK_TOKENS, RankPair, chunk_group
from kvferry.tools.bench.tier_cases import TierSpeed, measure_cases
from kvferry.geometry.models import ModelReading
from kvferry.tools.measuring.machine import MachineFacts, machine_facts
from kvferry.tools.plan.side import EngineSide


@dataclass(frozen=True, slots=True, kw_only=True)
class TiersJob:
    """The tiers that `kvferry bench tiers` measures, and the settings of the measurement.

    Attributes:
        reading: description of the KV cache of a model whose layers are all alike.
        sides: engines (layout and block size) for the host tier, each measured separately.
        depths: numbers of chunks in flight, or of threads for the host tier.
        repeats: number of counted rounds. One warm-up round before them is not counted.
        path: existing folder for the file tier. The files created there are removed.
        url: URL of the object storage; None to measure no object storage.
    """

    reading: ModelReading
    sides: tuple[EngineSide, ...]
    depths: tuple[int, ...]
    repeats: int
    path: Path
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

    Args:
        progress: function that is called with a line of text before each step.

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
