"""What processes hold, sample by sample, and whether it grows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

_WARM = 3
"""One in so many of the samples, the first ones, are not looked at: caches fill up."""
LEAST_SAMPLES = 4
"""With fewer that are looked at, nothing can be said about growth."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What all processes hold together.

    Attributes:
        at: seconds since the beginning.
        memory_mib: without pages of files, of which other programs on the machine share some; what these
            processes share among them counts once.
        descriptors, threads: how many.
        log_kib: size of their logs.
        shares_mib: memory by process.
    """

    at: float
    memory_mib: float
    descriptors: int
    threads: int
    log_kib: float
    shares_mib: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Limit:
    """Growth that is taken for noise.

    Attributes:
        per_hour: of a long soak.
        ever: from the first sample that is looked at to the last one, however short the time between them.
    """

    per_hour: float
    ever: float


_SHARES = re.compile(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB$", re.MULTILINE)
LIMITS = {
    "memory_mib": Limit(30.0, 6.0),
    "descriptors": Limit(6.0, 3.0),
    "threads": Limit(3.0, 2.0),
    "log_kib": Limit(100.0, 10.0),
}
"""A leak of one MiB a minute, or of one descriptor in a hundred requests, is at least twice these."""


def sample(
    at: float,
    pids: Mapping[str, int],
    logs: Iterable[Path],
    *,
    descendants: bool = True,
) -> Sample:
    """Measure processes and, unless `descendants` is False, all their descendants.

    Args:
        at: seconds since the beginning.
        pids: of the processes, by their names.
        logs: files.
    """
    every = [(f"{name}: {one.name()}", one) for name, pid in pids.items() for one in _tree(pid, descendants)]
    shares = Counter[str]()
    for name, one in every:
        shares[name] += _memory_bytes(one)
    return Sample(
        at,
        sum(shares.values()) / 2**20,
        sum(one.num_fds() for _, one in every),
        sum(one.num_threads() for _, one in every),
        sum(log.stat().st_size for log in logs) / 1024,
        {name: round(held / 2**20, 1) for name, held in shares.items()},
    )


def _tree(pid: int, descendants: bool) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *(root.children(recursive=True) if descendants else ())]


def _memory_bytes(process: psutil.Process) -> int:
    """The process's share of anonymous and shared memory."""
    text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    return 1024 * sum(int(found) for found in _SHARES.findall(text))


def looked_at(samples: Sequence[Sample]) -> Sequence[Sample]:
    """The samples after those during which caches filled up."""
    return samples[len(samples) // _WARM :]


def slopes(samples: Sequence[Sample]) -> dict[str, float]:
    """Growth per hour of everything, after the first third of the samples; empty if they are too few.

    >>> slopes([Sample(n * 60.0, 100.0 + n, 10, 5, 1.0) for n in range(9)])["memory_mib"]
    60.0
    """
    seen = looked_at(samples)
    if len(seen) < LEAST_SAMPLES:
        return {}
    hours = np.array([one.at for one in seen]) / 3600
    return {
        name: round(float(np.polyfit(hours, [getattr(one, name) for one in seen], 1)[0]), 3) + 0.0
        for name in LIMITS
    }


def largest_shares(samples: Sequence[Sample]) -> str:
    """Which processes' memory has grown, the most first; empty if none by a MiB or more.

    >>> grows = [Sample(n * 60.0, 9.0, 9, 9, 9.0, {"router: python": 5.0 + n}) for n in range(9)]
    >>> largest_shares(grows)
    'router: python +5.0 MiB'
    """
    seen = looked_at(samples)
    first, last = seen[0].shares_mib, seen[-1].shares_mib
    grown = sorted(((last[name] - first.get(name, 0.0), name) for name in last), reverse=True)
    return ", ".join(f"{name} {by:+.1f} MiB" for by, name in grown if by >= 1)


def growing(samples: Sequence[Sample]) -> list[str]:
    """Everything that grows."""
    growth, seen = slopes(samples), looked_at(samples)
    if not growth:
        return [f"{len(seen)} samples after the first third say nothing about growth, {LEAST_SAMPLES} would"]
    hours = (seen[-1].at - seen[0].at) / 3600
    return [
        f"{name} grows by {growth[name]:g} an hour, at most {most:g} are taken for noise"
        for name, limit in LIMITS.items()
        if growth[name] > (most := max(limit.per_hour, limit.ever / hours))
    ]


def table(samples: Sequence[Sample]) -> str:
    """The samples in a few rows: at a third, half, and at the end, and growth per hour."""
    growth = slopes(samples)
    shown = [samples[len(samples) // _WARM], samples[len(samples) // 2], samples[-1]]
    times = " | ".join(f"after {one.at / 60:.0f} min" for one in shown)
    rows = [f"| | {times} | growth per hour | limit |", "|---|---|---|---|---|---|"]
    for name in growth:
        values = " | ".join(f"{getattr(each, name):.0f}" for each in shown)
        words = name.replace("_mib", ", MiB").replace("_kib", ", KiB")
        rows.append(f"| {words} | {values} | {growth[name]:+.1f} | {LIMITS[name].per_hour:g} |")
    return "\n".join(rows)
