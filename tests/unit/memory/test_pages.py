"""Huge pages change nothing but how fast memory is, and memory is allocated from its beginning to its end."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvferry.geometry import Region
from kvferry.memory import pages
from kvferry.memory.pages import HugePageCollapser, PagePopulator, request_huge_pages
from kvferry.memory.shared_memory import map_shared
from support.waiting import wait_for

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
STEP = 4 << 20


def test_huge_pages_keep_the_content() -> None:
    memory = np.arange(1 << 20, dtype=np.uint64)
    region = Region(int(memory.ctypes.data) + 24, memory.nbytes - 24)
    request_huge_pages(region)
    HugePageCollapser([region]).wait()
    assert (memory == np.arange(1 << 20)).all()


@pytest.mark.parametrize(
    "region", [Region(8, 100), Region(1 << 60, 1 << 20), Region(1 << 30, 1 << 20, "VRAM")]
)
def test_impossible_regions_are_no_error(region: Region) -> None:
    request_huge_pages(region)
    HugePageCollapser([region]).wait()


def test_every_huge_page_of_a_region_is_collapsed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr(
        pages, "_advise", lambda first, size, advice: given.append((first, size, advice)) or 0
    )
    first, size = (1 << 40) + 4096, (100 << 20) + 8192
    HugePageCollapser([Region(first - 24, size + 24), Region(1 << 30, 1 << 20, "VRAM")]).wait()
    starts, sizes, advice = zip(*given, strict=True)
    assert set(advice) == {pages._COLLAPSE}
    assert (starts[0], sum(sizes)) == (first, size)
    assert all(a + n == b for a, n, b in zip(starts, sizes, starts[1:], strict=False))
    assert all(start % pages._LARGE_PAGE == 0 for start in starts[1:])


def test_a_region_is_left_at_once_when_its_memory_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    began, go_on, given = threading.Event(), threading.Event(), []

    def advise(*step: int) -> int:
        given.append(step)
        began.set()
        return 0 if go_on.wait(60) else errno.EINVAL

    monkeypatch.setattr(pages, "_advise", advise)
    collapser = HugePageCollapser([Region(1 << 40, 64 << 30)])
    assert began.wait(60)
    stopping = threading.Thread(target=collapser.stop)
    stopping.start()
    wait_for(collapser._stopped.is_set)
    go_on.set()
    stopping.join(60)
    assert len(given) == 1


@pytest.mark.skipif(
    not THP.exists() or "[never]" in THP.read_text(), reason="this kernel gives no large pages"
)
def test_memory_that_was_touched_gets_them() -> None:
    memory = np.frombuffer(bytearray(64 << 20), np.uint8)
    before = _large()
    HugePageCollapser([Region(int(memory.ctypes.data), memory.nbytes)]).wait()
    if _large() < before + (32 << 20):
        pytest.skip("the kernel has none to give")


@contextmanager
def mapped(size: int) -> Iterator[tuple[int, Region]]:
    fd = os.memfd_create("pages")
    os.ftruncate(fd, size)
    room, skip = map_shared(fd, size)
    memory = np.frombuffer(room, np.uint8, size, skip)
    try:
        yield fd, Region(int(memory.ctypes.data), size)
    finally:
        os.close(fd)


def allocated(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


@pytest.mark.parametrize("threads", [1, 3])
def test_all_memory_of_a_file_is_allocated(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(pages, "POPULATE_STEP_BYTES", STEP)
    ended = threading.Event()
    with mapped(5 * STEP + mmap.PAGESIZE) as (fd, region):
        populator = PagePopulator(fd, region, lambda _: ended.set(), threads)
        populator.wait()
        assert (populator.ready_bytes, allocated(fd)) == (region.length, region.length)
        assert populator.ended
        assert ended.is_set()
        assert populator.failure is None


def test_the_first_bytes_are_ready_at_once_and_others_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "POPULATE_STEP_BYTES", STEP)
    gates = {at: threading.Event() for at in (1, 2, 3)}
    passed = {at: threading.Event() for at in (1, 2, 3)}
    real = pages._advise
    with mapped(4 * STEP) as (fd, region):

        def advise(address: int, length: int, advice: int) -> int:
            step = (address - region.address) // STEP
            if step and advice == pages._COLLAPSE:
                assert gates[step].wait(60)
                passed[step].set()
            return real(address, length, advice)

        monkeypatch.setattr(pages, "_advise", advise)
        populator = PagePopulator(fd, region, threads=3)
        assert populator.ready_bytes == STEP
        gates[2].set()
        wait_for(lambda: 2 * STEP in populator._done)
        assert populator.ready_bytes == STEP, "a step before it is not allocated"
        gates[1].set()
        wait_for(lambda: populator.ready_bytes > STEP)
        assert populator.ready_bytes == 3 * STEP
        assert not populator.ended
        gates[3].set()
        populator.stop()


def test_memory_that_cannot_be_had_is_never_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "POPULATE_STEP_BYTES", STEP)
    real = pages._advise
    with mapped(6 * STEP) as (fd, region):

        def advise(address: int, length: int, advice: int) -> int:
            if address >= region.address + 3 * STEP and advice == pages._POPULATE_WRITE:
                return errno.ENOMEM
            return real(address, length, advice)

        monkeypatch.setattr(pages, "_advise", advise)
        ended = threading.Event()
        populator = PagePopulator(fd, region, lambda _: ended.set(), threads=2)
        populator.wait()
        assert (populator.ready_bytes, populator.failure) == (3 * STEP, "Cannot allocate memory")
        assert ended.is_set()
        with pytest.raises(OSError, match="Cannot allocate memory"):
            PagePopulator(fd, Region(region.address + 3 * STEP, STEP))


def test_a_kernel_that_cannot_populate_a_mapping_allocates_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "POPULATE_STEP_BYTES", STEP)
    monkeypatch.setattr(pages, "_advise", lambda *_: errno.EINVAL)
    with mapped(3 * STEP) as (fd, region):
        PagePopulator(fd, region).wait()
        assert allocated(fd) == region.length


def _large() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages"))
