"""How fast chunks move to and from every tier, as a share of what the same bytes reach without us."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from kvferry.bench import file_tier, host_tier, object_tier
from kvferry.bench.chunks import Ranks, chunk_group
from kvferry.bench.contest import Speed, run
from kvferry.geometry.models import ModelReading
from kvferry.plan.side import Side


def measure(
    reading: ModelReading,
    sides: Sequence[Side],
    depths: Sequence[int],
    repeats: int,
    path: Path,
    url: str | None,
    progress: Callable[[str], None],
) -> tuple[Speed, ...]:
    """Measure every tier.

    Args:
        reading: whose chunks.
        sides: engines, for the host tier, each measured by itself.
        depths: chunks under way at a time.
        repeats: rounds.
        path: folder for the file tier, which exists.
        url: of the object tier, None for none.
        progress: told what is going on.

    Raises:
        ConfigError: memory, folder or storage cannot be used.
        TransferError: a chunk did not come back as it was.
    """
    found: list[Speed] = []
    for side in sides:
        with Ranks(reading, side, max(depths)) as ranks, ExitStack() as stack:
            contests = host_tier.contests(stack, ranks, depths)
            found += run(contests, repeats, _said(progress, f"host tier, {side.layout}"))
            host_tier.prove(contests, ranks)
    group = chunk_group(reading)
    with ExitStack() as stack:
        contests = file_tier.contests(stack, group, path, depths)
        found += run(contests, repeats, _said(progress, "file tier"))
    if url is not None:
        with ExitStack() as stack:
            contests = object_tier.contests(stack, group, url, depths)
            found += run(contests, repeats, _said(progress, "object tier"))
    return tuple(found)


def _said(progress: Callable[[str], None], where: str) -> Callable[[str], None]:
    return lambda text: progress(f"{where}: {text}")
