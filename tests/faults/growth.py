"""What processes hold, sample by sample, and whether it grows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

_WARM = 3
"""One in so many of the samples, the first ones, are not looked at: caches fill up."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What all processes hold together.

    Attributes:
        at: seconds since the beginning.
        rss_mib, pss_mib: memory, and memory with what is shared counted once.
        descriptors, threads: how many.
        log_kib: size of their logs.
    """

    at: float
    rss_mib: float
    pss_mib: float
    descriptors: int
    threads: int
    log_kib: float


MOST_PER_HOUR = {"rss_mib": 200.0, "pss_mib": 200.0, "descriptors": 60.0, "threads": 30.0, "log_kib": 2000.0}
"""Growth that is taken for noise of a short soak."""


def sample(at: float, pids: Iterable[int], logs: Iterable[Path]) -> Sample:
    """Look at processes and all below them."""
    every = [one for pid in pids for one in _family(pid)]
    return Sample(
        at,
        sum(one.memory_info().rss for one in every) / 2**20,
        sum(map(_pss_bytes, every)) / 2**20,
        sum(one.num_fds() for one in every),
        sum(one.num_threads() for one in every),
        sum(log.stat().st_size for log in logs) / 1024,
    )


def _family(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def _pss_bytes(process: psutil.Process) -> int:
    text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    found = re.search(r"^Pss:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def slopes(samples: Sequence[Sample]) -> dict[str, float]:
    """Growth per hour of everything, from the samples that are not the first third.

    >>> slopes([Sample(n * 60.0, 100.0 + n, 50.0, 10, 5, 1.0) for n in range(9)])["rss_mib"]
    60.0
    """
    looked_at = samples[len(samples) // _WARM :]
    if len(looked_at) < 2:
        return {}
    hours = np.array([one.at for one in looked_at]) / 3600
    return {
        name: round(float(np.polyfit(hours, [getattr(one, name) for one in looked_at], 1)[0]), 3) + 0.0
        for name in MOST_PER_HOUR
    }


def problems(samples: Sequence[Sample]) -> list[str]:
    """Everything that grows."""
    return [
        f"{name} grows by {slope:g} an hour, at most {MOST_PER_HOUR[name]:g} are taken for noise"
        for name, slope in slopes(samples).items()
        if slope > MOST_PER_HOUR[name]
    ]


def table(samples: Sequence[Sample]) -> str:
    """The samples in a few rows: at a third, half, and at the end, and growth per hour."""
    growth = slopes(samples)
    shown = [samples[len(samples) // _WARM], samples[len(samples) // 2], samples[-1]]
    times = " | ".join(f"after {one.at / 60:.0f} min" for one in shown)
    rows = [f"| | {times} | growth per hour |", "|---|---|---|---|---|"]
    for name in growth:
        values = " | ".join(f"{getattr(each, name):.0f}" for each in shown)
        words = name.replace("_mib", ", MiB").replace("_kib", ", KiB")
        rows.append(f"| {words} | {values} | {growth[name]:+.1f} |")
    return "\n".join(rows)
