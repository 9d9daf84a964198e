"""`kvferry bench tiers`: the speed of every tier, compared with moving the same bytes without kvferry."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvferry.bench import file_tier, host_tier, object_tier
from kvferry.bench.rank_chunks import CHUNK_TOKENS, RankPair, chunk_group
from kvferry.bench.tier_cases import TierSpeed, measure_cases
from kvferry.geometry.models import ModelReading
from kvferry.measuring.machine import MachineFacts, machine_facts
from kvferry.plan.side import EngineSide


@dataclass(frozen=True, slots=True, kw_only=True)
class TiersJob:
    """The tiers to measure, and how.

    Attributes:
        reading: model whose chunks are stored and loaded; its layers are alike.
        sides: engines that chunks come from and go to, each measured by itself.
        depths: chunks in flight at a time.
        repeats: counted rounds; one more round comes before them.
        path: existing folder for the file tier; the files made there are removed.
        url: object storage, or None to leave it out.
    """

    reading: ModelReading
    sides: tuple[EngineSide, ...]
    depths: tuple[int, ...]
    repeats: int
    path: Path
    url: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTiers:
    """The results of a job.

    Attributes:
        job, machine: what was measured, and where.
        chunk_tokens, chunk_bytes: size of one chunk of the model.
        speeds: one per tier, direction and depth.
    """

    job: TiersJob
    machine: MachineFacts
    chunk_tokens: int
    chunk_bytes: int
    speeds: tuple[TierSpeed, ...]


def measure(job: TiersJob, progress: Callable[[str], None]) -> MeasuredTiers:
    """Store and load chunks in every tier.

    Args:
        job: the tiers to measure.
        progress: called with a line of text before each step.

    Raises:
        ConfigError: memory, folder or storage cannot be used.
        TransferError: a loaded chunk differs from the stored one.
    """
    group = chunk_group(job.reading)
    speeds: list[TierSpeed] = []
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
