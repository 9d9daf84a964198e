"""Growth is seen, and what stays flat is not taken for growth."""

from __future__ import annotations

import mmap
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from faults.growth import LEAST_SAMPLES, LIMITS, Sample, growing, sample, slopes, table

pytestmark = pytest.mark.slow

FLAT = [Sample(60.0 * n, 1000.0 + n % 2, 200, 80, 10.0) for n in range(60)]


def grown(name: str, by_per_minute: float) -> list[Sample]:
    """An hour in which one thing grows."""
    return [replace(one, **{name: getattr(one, name) + by_per_minute * n}) for n, one in enumerate(FLAT)]


def test_flat_samples_are_no_problem():
    assert not growing(FLAT)


@pytest.mark.parametrize(
    ("name", "by_per_minute"),
    [("memory_mib", 1.0), ("descriptors", 0.5), ("threads", 0.1), ("log_kib", 4.0)],
)
def test_each_leak_is_found_by_itself(name: str, by_per_minute: float):
    assert [line.split()[0] for line in growing(grown(name, by_per_minute))] == [name]


def test_everything_has_a_leak_that_is_found():
    tried = {"memory_mib", "descriptors", "threads", "log_kib"}
    assert tried == LIMITS.keys()


def test_a_leak_of_many_descriptors_is_found_in_minutes():
    short = [replace(one, at=10.0 * n) for n, one in enumerate(grown("descriptors", 2)[:9])]
    assert [line.split()[0] for line in growing(short)] == ["descriptors"]


def test_single_step_in_a_short_soak_is_no_leak():
    short = [replace(one, at=10.0 * n, threads=80 + (n > 5)) for n, one in enumerate(FLAT[:9])]
    assert not growing(short)


def test_growth_while_caches_fill_is_no_problem():
    warm = [replace(one, memory_mib=500.0, descriptors=100) if n < 20 else one for n, one in enumerate(FLAT)]
    assert not growing(warm)
    assert slopes(warm)["descriptors"] == 0


def test_samples_that_are_too_few_are_a_problem():
    assert growing(FLAT[: LEAST_SAMPLES - 1]) == [
        "2 samples after the first third say nothing about growth, 4 would"
    ]
    assert growing([])


def test_a_process_is_looked_at_with_all_that_it_holds(tmp_path: Path):
    log = tmp_path / "log"
    log.write_bytes(bytes(2048))
    found = sample(1.0, {"test": os.getpid()}, [log], descendants=False)
    (share,) = found.shares_mib.values()
    assert 10 < found.memory_mib == pytest.approx(share, abs=0.1)
    assert found.descriptors > 2
    assert found.threads >= 1
    assert found.log_kib == 2
    assert table([found, *FLAT[1:6]]).count("\n") == 5


def test_leaks_of_a_process_are_found(tmp_path: Path):
    log = tmp_path / "log"
    log.write_bytes(b"")
    stop, seen, kept = threading.Event(), [], []
    leaks = {
        # Fresh pages: an allocator may have freed ones, which are counted already.
        "memory_mib": lambda: kept.append(filled(mmap.mmap(-1, 4 << 20))),
        "descriptors": lambda: kept.append(log.open()),
        "threads": lambda: kept.append(started(threading.Thread(target=stop.wait))),
        "log_kib": lambda: log.write_bytes(bytes(log.stat().st_size + 4096)),
    }
    for n in range(12):
        for leak in leaks.values():
            leak()
        seen.append(sample(60.0 * n, {"test": os.getpid()}, [log], descendants=False))
    stop.set()
    for one in kept:
        one.join() if isinstance(one, threading.Thread) else one.close()
    assert {line.split()[0] for line in growing(seen)} == LIMITS.keys()


def filled(memory: mmap.mmap) -> mmap.mmap:
    """The memory, with a page behind each address."""
    memory.write(b"x" * len(memory))
    return memory


def started(thread: threading.Thread) -> threading.Thread:
    """The thread, started."""
    thread.start()
    return thread
